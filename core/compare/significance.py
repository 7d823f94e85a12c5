"""Whether two groups of runs differ in held-out accuracy, by the best test that the runs allow.

A test over problems is about the very models that were measured. One over seeds is about their
configs: would other seeds show the same? No difference is called real whose interval holds 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scipy import stats

from posttrain.core.comparison import Measure, Outcome, compare, same_problems
from posttrain.core.math.intervals import CONFIDENCE, newcombe_difference

How = Literal["paired over problems", "over seeds", "unpaired over problems"]


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

    def told(self) -> str:
        """The verdict as a sentence."""
        points = [f"{100 * value:+.1f}" for value in (self.difference, self.low, self.high)]
        better = self.second if self.difference > 0 else self.first
        verdict = f"{better} is better" if self.shown else "no difference is shown"
        return f"{verdict}: {points[0]} points (95 % interval {points[1]} to {points[2]})"


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
        tests.append(
            AccuracyTest(
                "paired over problems",
                measure,
                a.run,
                b.run,
                found.difference,
                found.low,
                found.high,
                detail,
            )
        )
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
        mean = math.fsum(rates) / len(rates)
        spread = math.fsum((rate - mean) ** 2 for rate in rates) / (len(rates) - 1)
        right, total = (sum(column) for column in zip(*group, strict=True))
        share = (right + 2) / (total + 4)
        variance = max(spread, share * (1 - share) * len(group) / total)
        means.append(mean)
        errors.append(variance / len(rates))
        freedom.append((variance / len(rates)) ** 2 / (len(rates) - 1))
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, sum(errors) ** 2 / sum(freedom)))
    half *= math.sqrt(sum(errors))
    difference = means[1] - means[0]
    return difference, max(-1.0, difference - half), min(1.0, difference + half)
