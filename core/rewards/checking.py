"""What a reward gave back, checked: anything that is no usable score becomes an `error`."""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import get_args

from posttrain.core.types import Score, ScoreStatus, StepVerdict

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
    """The score of a sample whose reward returned `what`, which is no score."""
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
