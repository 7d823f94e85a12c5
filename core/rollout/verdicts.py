"""Whether an answer is right: by the task, or by the environment that the episode was played in."""

from __future__ import annotations

from typing import Any

from posttrain.core.contracts import Task
from posttrain.core.types import Problem, Verdict


def verdict_of(task: Task[Any], problem: Problem, text: str, outcome: float | None) -> Verdict:
    """The task's verdict on `text`; of a task that leaves it to environments, their `outcome`."""
    if not task.by_environment:
        return task.verify(problem, text)
    if outcome is None:
        return Verdict(0.0, None)
    return Verdict(min(1.0, max(0.0, outcome)), f"{outcome:g}")
