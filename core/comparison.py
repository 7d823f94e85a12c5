"""Two evaluations of the same problems, compared problem by problem."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from posttrain.core.errors import RunError
from posttrain.core.math.paired import paired_means, paired_proportions

Measure = Literal["greedy", "sampled"]
ROWS_FILE = "rows.jsonl"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one model said of one problem; `sampled` is the share of right samples, if any."""

    key: str
    prompt: str
    answer: str
    text: str
    right: bool
    sampled: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The second model minus the first: the mean difference over problems, 95 % interval.

    `gained` problems only the second solves, `lost` only the first, greedily.
    """

    measure: Measure
    num_problems: int
    before: float
    after: float
    difference: float
    low: float
    high: float
    gained: int
    lost: int

    def told(self) -> str:
        """`+12.5 points (95 % interval +3.1 to +21.4), 9 gained, 1 lost of 64 problems`."""
        points = [f"{100 * value:+.1f}" for value in (self.difference, self.low, self.high)]
        return (
            f"{points[0]} points (95 % interval {points[1]} to {points[2]}), {self.gained} "
            f"gained, {self.lost} lost of {self.num_problems} problems"
        )


def read_outcomes(folder: Path) -> list[Outcome]:
    """The rows of an artifact of kind `evaluation`, in its order."""
    with (folder / ROWS_FILE).open(encoding="utf-8") as stream:
        return [_outcome(json.loads(line)) for line in stream]


def _outcome(row: dict[str, Any]) -> Outcome:  # Any: JSON that `write_evaluation` wrote
    problem = row["problem"]
    return Outcome(
        key=problem["key"],
        prompt=problem["prompt"],
        answer=problem["answer"],
        text=row["greedy_text"],
        right=row["greedy_correct"] >= 1.0,
        sampled=row["sampled_accuracy"],
    )


def same_problems(before: Sequence[Outcome], after: Sequence[Outcome]) -> bool:
    """Whether both are of the same problems in the same order."""
    return [row.key for row in before] == [row.key for row in after]


def compare(
    before: Sequence[Outcome], after: Sequence[Outcome], measure: Measure = "greedy"
) -> Comparison:
    """`after` against `before` on the same problems, in the same order.

    `greedy` compares right and wrong answers (Tango's score interval), `sampled` the share of right
    samples of each problem (a t-interval over problems). Raises `RunError` for other problems, and
    for `sampled` where nothing was sampled.
    """
    if not same_problems(before, after):
        raise RunError(
            f"the evaluations are not of the same problems ({len(before)} and {len(after)}): "
            "evaluate both models with the same settings"
        )
    gained = sum(b.right < a.right for b, a in zip(before, after, strict=True))
    lost = sum(b.right > a.right for b, a in zip(before, after, strict=True))
    if measure == "greedy":
        rates = [[float(row.right) for row in rows] for rows in (before, after)]
        difference, low, high = paired_proportions(gained, lost, len(before))
    else:
        rates = [[_sampled(row) for row in rows] for rows in (before, after)]
        difference, low, high = paired_means([a - b for b, a in zip(*rates, strict=True)])
    first, second = (sum(values) / len(values) for values in rates)
    return Comparison(
        measure, len(before), first, second, difference, low, high, gained=gained, lost=lost
    )


def _sampled(row: Outcome) -> float:
    if row.sampled is None:
        raise RunError(
            "measure 'sampled' needs sampled answers: set num_samples of the evaluation to 1 or "
            "more, or use measure 'greedy'"
        )
    return row.sampled
