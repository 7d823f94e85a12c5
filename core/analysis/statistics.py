"""Statistics of measured results: accuracies of models and of groups of runs, curves, ranks.

A test over problems is about the very models that were measured. One over seeds is about their
configs: would other seeds show the same? No difference is called real whose interval holds 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

import scipy  # its submodules load at first use: 0.5 s that a start does not wait for

from posttrain.core.errors import RunError
from posttrain.core.math.intervals import (
    mean_interval,
    newcombe_difference,
    paired_means,
    paired_proportions,
    t_quantile,
)

if TYPE_CHECKING:  # nothing else here needs torch
    from torch import Tensor

Measure = Literal["greedy", "sampled"]
How = Literal["paired over problems", "over seeds", "unpaired over problems"]
ROWS_FILE = "rows.jsonl"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One model's answer to one problem; `sampled` is the share of right samples, if any."""

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

    def describe(self) -> str:
        """`+12.5 points (95 % interval +3.1 to +21.4), 9 gained, 1 lost of 64 problems`."""
        points = _points(self.difference, self.low, self.high)
        return f"{points}, {self.gained} gained, {self.lost} lost of {self.num_problems} problems"


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


def _points(difference: float, low: float, high: float) -> str:
    """`+12.5 points (95 % interval +3.1 to +21.4)`."""
    return f"{100 * difference:+.1f} points (95 % interval {100 * low:+.1f} to {100 * high:+.1f})"


# --- groups of runs ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run's answers to its held-out problems."""

    run: str
    seed: int
    outcomes: Sequence[Outcome]

    @property
    def right(self) -> tuple[int, int]:
        """Problems solved greedily, and all of them."""
        return sum(row.right for row in self.outcomes), len(self.outcomes)


@dataclass(frozen=True, slots=True)
class AccuracyTest:
    """`second` minus `first`, as a fraction, with its 95 % interval."""

    how: How
    measure: Measure
    first: str
    second: str
    difference: float
    low: float
    high: float
    detail: str

    @property
    def shown(self) -> bool:
        """Whether the interval shows a difference: 0 is not in it."""
        return self.low > 0 or self.high < 0

    def describe(self) -> str:
        """The verdict as a sentence."""
        better = self.second if self.difference > 0 else self.first
        verdict = f"{better} is better" if self.shown else "no difference is shown"
        return f"{verdict}: {_points(self.difference, self.low, self.high)}"


def group_tests(
    first: Sequence[MeasuredRun], second: Sequence[MeasuredRun], names: tuple[str, str]
) -> list[AccuracyTest]:
    """Every test of two groups that their runs allow; none if either was not measured.

    Over seeds where both have two or more; paired over problems for each two runs of a seed that
    answered the same ones, and, where nothing else can be said, for the first two of other seeds
    that did; else unpaired for the first of each.
    """
    if not first or not second:
        return []
    tests = []
    if len(first) > 1 and len(second) > 1:
        found = seeds_difference([r.right for r in first], [r.right for r in second])
        detail = f"Welch's interval over {len(first)} and {len(second)} seeds"
        tests.append(AccuracyTest("over seeds", "greedy", *names, *found, detail))
    pairs = [(a, b) for a in first for b in second if same_problems(a.outcomes, b.outcomes)]
    of_a_seed = [(a, b) for a, b in pairs if a.seed == b.seed]
    for a, b in of_a_seed or ([] if tests else pairs[:1]):
        tests += _paired(a, b)
    if not tests:
        found = newcombe_difference(first[0].right, second[0].right)
        detail = "Newcombe's interval: other problems, one run each"
        names = (first[0].run, second[0].run)
        tests.append(AccuracyTest("unpaired over problems", "greedy", *names, *found, detail))
    return tests


def _paired(a: MeasuredRun, b: MeasuredRun) -> list[AccuracyTest]:
    """Greedy answers, and shares of right samples where both have them."""
    measures: list[Measure] = ["greedy"]
    if all(row.sampled is not None for row in (*a.outcomes, *b.outcomes)):
        measures.append("sampled")
    tests = []
    for measure in measures:
        found = compare(a.outcomes, b.outcomes, measure)
        detail = (
            f"Tango's interval, {found.gained} gained, {found.lost} lost of {found.num_problems}"
            if measure == "greedy"
            else f"t-interval over {found.num_problems} problems"
        )
        ends = (found.difference, found.low, found.high)
        tests.append(AccuracyTest("paired over problems", measure, a.run, b.run, *ends, detail))
    return tests


def seeds_difference(
    first: Sequence[tuple[int, int]], second: Sequence[tuple[int, int]]
) -> tuple[float, float, float]:
    """`second` minus `first` over seeds, each a (right, problems): (difference, low, high).

    Welch's interval (1947, degrees of freedom by Satterthwaite) of the accuracies. A group's
    variance is at least that which drawing its problems alone gives, p (1 - p) / n with two right
    and two wrong ones added: equal accuracies of few seeds would else have an interval of no width.
    Raises `ValueError` for a group of fewer than two.
    """
    if min(len(first), len(second)) < 2:
        raise ValueError(f"{len(first)} and {len(second)} seeds, expected at least 2 each")
    means, errors, freedom = [], [], []
    for group in (first, second):
        rates = [right / total for right, total in group]
        mean = fmean(rates)
        spread = math.fsum((rate - mean) ** 2 for rate in rates) / (len(rates) - 1)
        right, total = (sum(column) for column in zip(*group, strict=True))
        share = (right + 2) / (total + 4)
        variance = max(spread, share * (1 - share) * len(group) / total)
        means.append(mean)
        errors.append(variance / len(rates))
        freedom.append((variance / len(rates)) ** 2 / (len(rates) - 1))
    half = t_quantile(sum(errors) ** 2 / sum(freedom))
    half *= math.sqrt(sum(errors))
    difference = means[1] - means[0]
    return difference, max(-1.0, difference - half), min(1.0, difference + half)


# --- curves -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Point:
    """The mean over `num_runs` at a step, with its 95 % t-interval.

    None of a single run, and where all runs are equal: the interval would have no width, and few
    equal values say nothing of those to come.
    """

    step: int
    mean: float
    low: float | None
    high: float | None
    num_runs: int


def mean_curve(runs: Sequence[Mapping[int, float]]) -> list[Point]:
    """A point for each step that any of `runs` has a value at, over those that do, in order."""
    steps = sorted({step for run in runs for step in run})
    return [point(step, [run[step] for run in runs if step in run]) for step in steps]


def point(step: int, values: Sequence[float]) -> Point:
    """One point; of a single value, or equal ones, the spread is not known."""
    mean, low, high = mean_interval(values, bounds=None)
    several = max(values) > min(values)
    return Point(step, mean, low if several else None, high if several else None, len(values))


# --- rankings ------------------------------------------------------------------------------------


def rank_correlation(first: Tensor, second: Tensor) -> float | None:
    """Spearman's rho of two vectors [N], ties at their mean rank.

    None for fewer than two places or where all values of either are equal: there is no order.
    """
    if first.numel() < 2:
        return None
    a, b = (scipy.stats.rankdata(values.double().numpy()) for values in (first, second))
    a, b = a - a.mean(), b - b.mean()
    scale = math.sqrt(float(a @ a) * float(b @ b))
    return bounded(float(a @ b) / scale) if scale else None


def bounded(cosine: float) -> float:
    """A cosine that rounding took beyond 1 or -1, back at it."""
    return max(-1.0, min(1.0, cosine))


def sampled_tokens(row: Mapping[str, float]) -> float | None:
    """Response tokens that a step sampled, those of groups that were drawn again included."""
    return row.get("sampling/tokens_drawn", row.get("tokens/response"))
