"""What a reward returned, checked, and failed samples counted."""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, get_args

from posttrain.core.errors import DataError, RunError
from posttrain.core.types import Score, ScoreStatus, StepVerdict

if TYPE_CHECKING:  # reward workers must not load torch
    from posttrain.core.batch import RolloutBatch
    from posttrain.core.rewards.weighted import WeightedReward
    from posttrain.core.types import Problem

STATUSES: frozenset[str] = frozenset(get_args(ScoreStatus))
FAILURES: frozenset[str] = frozenset({"error", "timeout", "crashed"})
"""Statuses that mean something went wrong; `unscored` is a reward's own decision."""
MAX_DETAIL = 500  # characters


def is_failure(score: Score) -> bool:
    return score.status in FAILURES


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return shortened(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def shortened(text: str) -> str:
    return text if len(text) <= MAX_DETAIL else text[: MAX_DETAIL - 3] + "..."


def failed(what: str) -> Score:
    """The score of a sample whose reward returned `what`, which is not a score."""
    return Score(None, "error", shortened(f"the reward returned {what}"))


def only_score(answer: object) -> Score:
    """The score in what a reward returned for one sample, or an `error`."""
    if isinstance(answer, str) or not isinstance(answer, Sequence):
        return failed(f"{reprlib.repr(answer)}, expected a list with one Score")
    if len(answer) != 1:
        return failed(f"{len(answer)} scores for one sample")
    return checked_score(answer[0])


def checked_score(found: object) -> Score:
    """`found` as a score of plain numbers, or an `error` that says what came instead."""
    if not isinstance(found, Score):
        return failed(f"{reprlib.repr(found)}, expected a Score")
    if found.status not in STATUSES:
        return failed(f"the status {reprlib.repr(found.status)}, known: {sorted(STATUSES)}")
    detail = shortened(str(found.detail))
    if found.value is None or found.status != "ok":
        status: ScoreStatus = "unscored" if found.status == "ok" else found.status
        return Score(None, status, detail)
    value = _finite(found.value)
    if value is None:
        return failed(f"the value {reprlib.repr(found.value)}, expected a finite number or None")
    steps = _steps(found.steps)
    if steps is None:
        return failed(f"the steps {reprlib.repr(found.steps)}, expected finite StepVerdicts")
    components = _components(found.components)
    if components is None:
        return failed(f"the components {reprlib.repr(found.components)}, expected finite numbers")
    return replace(found, value=value, detail=detail, steps=steps, components=components)


def _finite(value: object) -> float | None:
    if not isinstance(value, numbers.Real):
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def _steps(steps: object) -> tuple[StepVerdict, ...] | None:
    if not isinstance(steps, Sequence):
        return None
    found = []
    for step in steps:
        correct = _finite(step.correct) if isinstance(step, StepVerdict) else None
        if correct is None or not isinstance(step.end, int):
            return None
        found.append(StepVerdict(step.end, correct))
    return tuple(found)


def _components(components: object) -> dict[str, float] | None:
    if not isinstance(components, Mapping):
        return None
    found: dict[str, float] = {}
    for name, part in components.items():
        value = _finite(part)
        if value is None:
            return None
        found[str(name)] = value
    return found


_SHOWN = 3
_PROMPT_CHARACTERS = 60
_COUNTED = {"reward/timeouts": "timeout", "reward/crashes": "crashed", "reward/errors": "error"}


def failure_metrics(scores: Sequence[Sequence[Score]], names: Sequence[str]) -> dict[str, float]:
    """Counts of failed scores, all and by status, and each reward's share; `scores` is [B][K]."""
    if not scores:
        return {}
    found = [score for row in scores for score in row]
    metrics = {"reward/failures": float(sum(map(is_failure, found)))}
    for metric, status in _COUNTED.items():
        metrics[metric] = float(sum(score.status == status for score in found))
    for place, name in enumerate(names):
        failures = sum(is_failure(row[place]) for row in scores)
        if failures:
            metrics[f"reward/failed_frac/{name}"] = failures / len(scores)
    return metrics


def check_failure_rate(batch: RolloutBatch, names: Sequence[str], limit: float) -> None:
    """Raise `RunError`, with the first three failures, when too many rows of `batch` have one."""
    failed = [row for row, scores in enumerate(batch.scores) if any(map(is_failure, scores))]
    share = len(failed) / max(1, len(batch.scores))
    if share <= limit:
        return
    lines = [_describe(batch, row, names) for row in failed[:_SHOWN]]
    listed = "".join(f"\n  {number}. {line}" for number, line in enumerate(lines, start=1))
    raise RunError(
        f"rewards failed on {len(failed)} of {len(batch.scores)} responses ({share:.0%}), more "
        f"than reward_pool.max_failure_rate ({limit:.0%}) allows; the first are:{listed}\n"
        "Fix the reward; if its limit is too short, raise reward_pool.timeout_s; if such failures "
        "are to be expected, raise reward_pool.max_failure_rate (failed responses are not trained "
        "on)."
    )


def _describe(batch: RolloutBatch, row: int, names: Sequence[str]) -> str:
    """One failed row: which reward, its status and detail, and the prompt's start."""
    name, score = next(
        (name, score)
        for name, score in zip(names, batch.scores[row], strict=True)
        if is_failure(score)
    )
    prompt = " ".join(batch.problems[row].prompt.split()) if batch.problems else ""
    if len(prompt) > _PROMPT_CHARACTERS:
        prompt = prompt[:_PROMPT_CHARACTERS] + "..."
    return f"reward '{name}': {score.status}: {score.detail or 'no detail'}; prompt {prompt!r}"


MOST_REFERENCES = 300
"""Problems whose references are looked at: some take a process each."""


def unreadable_references(
    rewards: Sequence[WeightedReward], problems: Sequence[Problem]
) -> list[str]:
    """A sentence for each reward that cannot read some problems' right answers.

    Raises `DataError` for a reward that can read none of them.
    """
    distinct = list({problem.key: problem for problem in problems}.values())[:MOST_REFERENCES]
    found = []
    for weighted in rewards:
        asked = [problem for problem in distinct if weighted.scores(problem)]
        unreadable = weighted.reward.unreadable
        reasons = [(problem, why) for problem in asked if (why := unreadable(problem))]
        if not reasons:
            continue
        problem, why = reasons[0]
        prompt = reprlib.repr(" ".join(problem.prompt.split()))
        sentence = (
            f"reward '{weighted.name}' cannot read the right answers of {len(reasons)} of "
            f"{len(asked)} problems, such as that of {prompt} ({shortened(why)})"
        )
        if len(reasons) == len(asked):
            raise DataError(f"{sentence}: correct the data, or choose another reward")
        found.append(f"{sentence}; responses to them are not scored")
    return found
