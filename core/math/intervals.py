"""95 % intervals of measured accuracies and of the difference between two of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import scipy  # its submodules load at first use: 0.5 s that a start does not wait for

CONFIDENCE = 0.95


def wilson(successes: int, total: int) -> tuple[float, float]:
    """Wilson's 95 % interval (low, high) of a proportion (Wilson 1927).

    With `total` 0 nothing is known: (0, 1). Raises `ValueError` unless 0 <= successes <= total.
    """
    if not 0 <= successes <= total:
        raise ValueError(f"successes is {successes}, expected 0 to total ({total})")
    if total == 0:
        return 0.0, 1.0
    interval = scipy.stats.binomtest(successes, total).proportion_ci(CONFIDENCE, method="wilson")
    return float(interval.low), float(interval.high)


def mean_interval(
    values: Sequence[float], bounds: tuple[float, float] | None = (0.0, 1.0)
) -> tuple[float, float, float]:
    """Mean of `values` with its 95 % t-interval: (mean, low, high), cut to `bounds` unless None.

    One value per *problem*: samples of one problem are not independent, so average them first. A
    single value says nothing about the spread, so its interval is the whole of `bounds`. Values
    that are all equal have an interval of zero width: for 0/1 outcomes use `wilson` instead.
    Raises `ValueError` when `values` is empty.
    """
    if not values:
        raise ValueError("values is empty, expected at least one: measure before summarising")
    lowest, highest = bounds if bounds is not None else (-math.inf, math.inf)
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, lowest, highest
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    quantile = float(scipy.stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
    half = quantile * math.sqrt(variance / len(values))
    return mean, max(lowest, mean - half), min(highest, mean + half)


def standard_error(values: Sequence[float]) -> float | None:
    """s / sqrt(n) of `values`, one per problem, s with n - 1; None of a single one."""
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return math.sqrt(variance / len(values))


def newcombe_difference(
    before: tuple[int, int], after: tuple[int, int]
) -> tuple[float, float, float]:
    """`after` minus `before` with its 95 % interval: (difference, low, high).

    Both are (successes, total). Newcombe's hybrid of two Wilson intervals (Newcombe 1998, method
    10), for independent samples: on one and the same set of problems it is wider than need be, not
    narrower, as long as the two results agree more often than chance. Raises `ValueError` when a
    total is below 1.
    """
    if before[1] < 1 or after[1] < 1:
        raise ValueError(f"totals are {before[1]} and {after[1]}, expected at least 1 each")
    rate_before, rate_after = before[0] / before[1], after[0] / after[1]
    low_before, high_before = wilson(*before)
    low_after, high_after = wilson(*after)
    difference = rate_after - rate_before
    down = math.hypot(rate_after - low_after, high_before - rate_before)
    up = math.hypot(high_after - rate_after, rate_before - low_before)
    return difference, difference - down, difference + up
