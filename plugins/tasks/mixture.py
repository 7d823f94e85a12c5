"""Several tasks as one, each with its share of the problems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from pydantic import Field, field_validator

from posttrain.core.contracts import Component, PluginConfig, Task
from posttrain.core.contracts.preference_rows import PreferenceRow
from posttrain.core.errors import DataError
from posttrain.core.math.splits import text_key
from posttrain.core.types import TASK, Problem, Split, StepVerdict, Verdict

MOST_PARTS = 64
SUFFIX = "mixture_suffix"
"""What the key of a problem ends with that comes again, in its metadata."""


class TaskPart(Component):
    """One task of the mixture, with its own fields next to these."""

    weight: float = Field(
        default=1.0, gt=0, le=1_000_000, description="share of the problems, relative to the others"
    )
    label: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$",
        description="what metrics call it; null = the task's name, with _2 for the second of it",
    )


class MixtureConfig(PluginConfig):
    """Settings of `mixture`."""

    tasks: tuple[TaskPart, ...] = Field(
        default=(TaskPart(name="digits"), TaskPart(name="arithmetic")),
        min_length=1,
        max_length=MOST_PARTS,
        description="the tasks, each with its fields, a weight and a label",
    )

    @field_validator("tasks")
    @classmethod
    def _can_be_told_apart(cls, parts: tuple[TaskPart, ...]) -> tuple[TaskPart, ...]:
        if any(part.name == MixtureTask.name for part in parts):
            raise ValueError("a mixture holds no other mixture: list all tasks in one")
        labels = labels_of(parts)
        if len(set(labels)) < len(labels):
            raise ValueError(f"two tasks have one label: {labels}; give them different ones")
        return parts


class MixtureTask(Task[MixtureConfig]):
    """Problems of several tasks, in shares of weight_k / sum of weights; each judges its own.

    Any stretch of the problems has the shares, up to one problem. The problems of a task that has
    too few for its share of training come again, before all of the others were seen once; the
    held-out ones are as many as the shares allow. The stage's sampler may change the shares:
    `progress`.
    Source: own; shares as in T5, arXiv:1910.10683, section 3.5.2.
    """

    name = "mixture"
    Config = MixtureConfig

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__(config)
        self._tasks: Mapping[str, Task[Any]] = {}

    def parts(self) -> Mapping[str, Component]:
        """The tasks by label."""
        return dict(zip(labels_of(self.config.tasks), self.config.tasks, strict=True))

    def setup(self, tasks: Mapping[str, Task[Any]]) -> None:
        self._tasks = tasks

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        """`count` problems, those of each task in its own order. Raises `DataError`."""
        held = self.available(split)
        if held is not None and split == "held_out" and held < count:
            raise DataError(
                f"task 'mixture' has {held} held-out problems in these shares, {count} are wanted: "
                "ask for fewer, or change the weights"
            )
        turns = [label for label, _ in zip(self._turns(), range(count), strict=False)]
        sources = {
            label: iter(self._of_one(label, split, wanted, seed))
            for label, wanted in Counter(turns).items()
        }
        return [next(sources[label]) for label in turns]

    def _of_one(self, label: str, split: Split, wanted: int, seed: int) -> list[Problem]:
        """`wanted` problems of a task, the same ones again where it has fewer."""
        task = self._tasks[label]
        held = task.available(split)
        once = task.problems(split, wanted if held is None else min(wanted, held), seed)
        if not once:
            raise DataError(f"task 'mixture': its task '{label}' has no problem of {split}")
        found = []
        for index in range(wanted):
            again, place = divmod(index, len(once))
            problem, suffix = once[place], f"#{again + 1}" if again else ""
            marked = {**problem.metadata, TASK: label, SUFFIX: suffix}
            found.append(replace(problem, key=f"{label}/{problem.key}{suffix}", metadata=marked))
        return found

    def _turns(self) -> Iterator[str]:
        """Labels without end, in which every stretch has the shares."""
        weights = {label: part.weight for label, part in self._weighted()}
        total, credit = sum(weights.values()), dict.fromkeys(weights, 0.0)
        for _ in count():
            for label, weight in weights.items():
                credit[label] += weight / total
            chosen = max(credit, key=lambda label: credit[label])
            credit[chosen] -= 1
            yield chosen

    def _weighted(self) -> list[tuple[str, TaskPart]]:
        return list(zip(labels_of(self.config.tasks), self.config.tasks, strict=True))

    def available(self, split: Split) -> int | None:
        """Training: until every task was seen once. Held out: while no task comes again."""
        total = sum(part.weight for part in self.config.tasks)
        lengths = []
        for label, part in self._weighted():
            held = self._tasks[label].available(split)
            if held is not None:
                lengths.append(int(held * total / part.weight))
            elif split == "train":
                return None
        if not lengths:
            return None
        return max(lengths) if split == "train" else min(lengths)

    def fingerprint(self) -> str:
        """Those of its tasks."""
        found = [task.fingerprint() for task in self._tasks.values()]
        return text_key("|".join(found)) if any(found) else ""

    def verify(self, problem: Problem, text: str) -> Verdict:
        """As the problem's own task."""
        task, own = self._own(problem)
        return task.verify(own, text)

    def verdict(self, problem: Problem, text: str, outcome: float | None) -> Verdict:
        """As the problem's own task."""
        task, own = self._own(problem)
        return task.verdict(own, text, outcome)

    def verify_steps(self, problem: Problem, text: str) -> tuple[StepVerdict, ...]:
        """As the problem's own task."""
        task, own = self._own(problem)
        return task.verify_steps(own, text)

    def question(self, problem: Problem) -> str:
        """As the problem's own task."""
        task, own = self._own(problem)
        return task.question(own)

    def rewritten(self, question: str, answer: str) -> Problem:
        """Raises `DataError`: a new problem belongs to none of the tasks."""
        raise DataError(
            "the problems of task 'mixture' are not rewritten: let a run of its own do that for "
            "one of its tasks, and name the result as a task `rows`"
        )

    def source(self) -> str:
        return "; ".join(f"{label}: {task.source()}" for label, task in self._tasks.items())

    def unjudged(self, tasks: Collection[str] = ()) -> str:
        """The first of its tasks' own."""
        asked = [task for label, task in self._tasks.items() if not tasks or label in tasks]
        return next(filter(None, (task.unjudged() for task in asked)), "")

    def notes(self) -> list[str]:
        return [f"{label}: {note}" for label, task in self._tasks.items() for note in task.notes()]

    def preferences(self) -> list[PreferenceRow]:
        """Those of all its tasks."""
        return [row for task in self._tasks.values() for row in task.preferences()]

    def _own(self, problem: Problem) -> tuple[Task[Any], Problem]:
        """The task that a problem is of, and the problem as that task made it."""
        label, suffix = problem.metadata[TASK], problem.metadata[SUFFIX]
        key = problem.key.removeprefix(f"{label}/").removesuffix(suffix)
        return self._tasks[label], replace(problem, key=key)


def labels_of(parts: Sequence[TaskPart]) -> list[str]:
    """What each task is called: its label, or its name, with a number if it was taken."""
    found: list[str] = []
    for part in parts:
        name = part.label or part.shown
        names = (name if number == 1 else f"{name}_{number}" for number in count(1))
        found.append(name if part.label else next(each for each in names if each not in found))
    return found
