"""What tasks promise."""

from __future__ import annotations

from math import isfinite
from typing import get_args

from posttrain.core.config.base import NO_TASK
from posttrain.core.kit.checks import Skipped, Subject, check, expect, expect_equal
from posttrain.core.types import Problem, Split

COUNTS: dict[Split, int] = {"train": 50, "held_out": 10}
ODD_ANSWERS = ("", " ", "\x00", "-", "1" * 5000, "((", "\U0001f600", "١٢")


def _real(subject: Subject) -> None:
    if subject.entry.name == NO_TASK:
        raise Skipped("it stands for having no task")


def _count(subject: Subject, split: Split, wanted: int) -> int:
    held = subject.build().available(split)
    return wanted if held is None else min(wanted, held)


@check("problems have distinct keys, as many as asked for, the same for a seed", "task")
def _problems(subject: Subject) -> None:
    _real(subject)
    for seed in range(4):
        for split in get_args(Split):
            count = _count(subject, split, COUNTS[split])
            expect(count > 0, f"the split {split} is empty")
            problems = subject.build().problems(split, count, seed)
            expect_equal(len(problems), count, f"problems of {split}")
            keys = {problem.key for problem in problems}
            expect_equal(len(keys), count, f"different keys among {count} problems of {split}")
            again = subject.build().problems(split, count, seed)
            expect(again == problems, f"seed {seed} gives other problems of {split} each time")


@check("no problem of train is held out, whatever the seeds", "task")
def _disjoint(subject: Subject) -> None:
    _real(subject)
    keys: dict[str, set[str]] = {}
    for split in get_args(Split):
        count = _count(subject, split, COUNTS[split])
        problems = (p for seed in range(4) for p in subject.build().problems(split, count, seed))
        keys[split] = {problem.key for problem in problems}
    both = sorted(keys["train"] & keys["held_out"])
    expect(not both, f"{len(both)} keys are in both splits, such as {both[:1]}")


@check("its worked answers are right, and no text makes it raise", "task")
def _verdicts(subject: Subject) -> None:
    _real(subject)
    task = subject.build()
    if task.by_environment:
        raise Skipped("environments judge its problems")
    for problem in task.problems("train", _count(subject, "train", 20), seed=0):
        expect(isinstance(problem, Problem), f"it gives {type(problem).__name__}, not Problem")
        expect(problem.prompt, f"the problem {problem.key!r} has no prompt")
        expect(problem.answer, f"the problem {problem.key!r} has no answer")
        worked = task.verify(problem, problem.worked).correct
        expect(worked == 1.0, f"its worked answer {problem.worked!r} is judged {worked}, not 1")
        for text in ODD_ANSWERS:
            correct = task.verify(problem, text).correct
            expect(
                isfinite(correct) and 0.0 <= correct < 1.0,
                f"the text {text[:20]!r} is judged {correct}, expected 0 to below 1",
            )


@check("the digest of what it reads is stable", "task")
def _fingerprint(subject: Subject) -> None:
    digests = {subject.build().fingerprint() for _ in range(2)}
    expect(len(digests) == 1, "`fingerprint` differs from one plugin to the next")
    expect(subject.build().source(), "`source` says nothing")
