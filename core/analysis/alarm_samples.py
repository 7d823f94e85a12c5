"""Which of a step's responses show what an alarm is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SHOWN = 5
"""Rows that an alarm names."""
Row = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class StepSamples:
    """A step's responses as its table `samples` has them, and some figures of each row.

    `lengths` are tokens, `entropies` nats per token where the update read them.
    """

    step: int
    rows: Sequence[Row] = ()
    lengths: Sequence[float] = ()
    entropies: Sequence[float] = ()


Picked = tuple[str, list[int]]
"""What the rows are, and their numbers from 0."""


def _largest(what: str, values: Sequence[float], *, sign: float = 1.0) -> Picked:
    known = [i for i, value in enumerate(values) if value == value]
    return what, sorted(known, key=lambda i: -sign * values[i])[:SHOWN]


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


def longest(samples: StepSamples) -> Picked:
    return _largest("the longest responses", samples.lengths)


def shortest(samples: StepSamples) -> Picked:
    return _largest("the shortest responses", samples.lengths, sign=-1)


def most_entropy(samples: StepSamples) -> Picked:
    return _largest("the responses of highest entropy", samples.entropies)


def least_entropy(samples: StepSamples) -> Picked:
    return _largest("the responses of lowest entropy", samples.entropies, sign=-1)


def most_weight(samples: StepSamples) -> Picked:
    values = [abs(_number(row.get("advantage"))) for row in samples.rows]
    return _largest("the responses of largest advantage", values)


def cut(samples: StepSamples) -> Picked:
    found = [i for i, row in enumerate(samples.rows) if row.get("finish_reason") == "length"]
    return "responses that the limit cut", found[:SHOWN]


def paid_though_wrong(samples: StepSamples) -> Picked:
    rewards = [_number(row.get("reward")) for row in samples.rows]
    wrong = [_number(row.get("correct")) < 1 for row in samples.rows]
    paid = [r if w else float("nan") for r, w in zip(rewards, wrong, strict=True)]
    what, found = _largest("wrong responses with the most reward", paid)
    return (what, found) if found else _largest("responses with the most reward", rewards)


def equal_groups(samples: StepSamples) -> Picked:
    """The first row of each group whose rewards are all equal."""
    groups: dict[object, list[int]] = {}
    for index, row in enumerate(samples.rows):
        groups.setdefault(row.get("group"), []).append(index)
    equal = [
        rows[0]
        for rows in groups.values()
        if len(rows) > 1 and len({samples.rows[i].get("reward") for i in rows}) == 1
    ]
    return "first rows of groups with equal rewards", equal[:SHOWN]


def repeated(samples: StepSamples) -> Picked:
    seen, found = set[tuple[object, object]](), list[int]()
    for index, row in enumerate(samples.rows):
        key = (row.get("group"), row.get("response"))
        if key in seen:
            found.append(index)
        seen.add(key)
    return "responses that repeat one of their group", found[:SHOWN]
