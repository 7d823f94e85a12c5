"""95 % intervals of accuracies and of differences, paired by problem where both models saw it.

Two answers to one problem are not independent, so each problem is compared with itself: what
decides is how many problems one model alone solves, not how many each solves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import scipy  # its submodules load at first use; `scipy.stats` takes 0.6 s, `scipy.special` 0.1

CONFIDENCE = 0.95


def normal_quantile() -> float:
    """How many standard deviations a 95 % interval reaches on either side."""
    return float(scipy.special.ndtri((1 + CONFIDENCE) / 2))


def t_quantile(freedom: float) -> float:
    """The same of Student's t with so many degrees of freedom."""
    return float(scipy.special.stdtrit(freedom, (1 + CONFIDENCE) / 2))


def wilson(successes: int, total: int) -> tuple[float, float]:
    """Wilson's 95 % interval (low, high) of a proportion (Wilson 1927).

    With `total` 0 nothing is known: (0, 1). Raises `ValueError` unless 0 <= successes <= total.
    """
    if not 0 <= successes <= total:
        raise ValueError(f"successes is {successes}, expected 0 to total ({total})")
    if total == 0:
        return 0.0, 1.0
    share = successes / total
    middle, half = _score_interval(share, total)
    low = middle - half if successes else 0.0
    return low, middle + half if successes < total else 1.0


def _score_interval(share: float, trials: float) -> tuple[float, float]:
    """Middle and half width of Wilson's interval."""
    quantile = normal_quantile()
    shrink = 1 + quantile**2 / trials
    middle = (share + quantile**2 / (2 * trials)) / shrink
    spread = math.sqrt(share * (1 - share) / trials + (quantile / trials) ** 2 / 4)
    return middle, quantile / shrink * spread


def mean_interval(
    values: Sequence[float], bounds: tuple[float, float] | None = (0.0, 1.0)
) -> tuple[float, float, float]:
    """Mean of `values` with its 95 % t-interval: (mean, low, high), cut to `bounds` unless None.

    One value per *problem*: samples of one problem are not independent, so average them first. A
    single value says nothing about the spread, so its interval is the whole of `bounds`. Values
    that are all equal have an interval of zero width: for shares use `share_interval` instead.
    Raises `ValueError` when `values` is empty.
    """
    if not values:
        raise ValueError("values is empty, expected at least one: measure before summarising")
    lowest, highest = bounds if bounds is not None else (-math.inf, math.inf)
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, lowest, highest
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    half = t_quantile(len(values) - 1) * math.sqrt(variance / len(values))
    return mean, max(lowest, mean - half), min(highest, mean + half)


def share_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean of shares in [0, 1], one per problem, with a 95 % interval: (mean, low, high).

    Wilson's where every share is 0 or 1. Else the t-interval of the shares and two more, 0 and 1,
    cut to [0, 1]: a few problems with equal shares say little of other problems, so the interval
    always has a width. Raises `ValueError` when `values` is empty.
    """
    if not values:
        raise ValueError("values is empty, expected at least one: measure before summarising")
    mean = math.fsum(values) / len(values)
    if set(values) <= {0.0, 1.0}:
        return mean, *wilson(round(math.fsum(values)), len(values))
    _, low, high = mean_interval([*values, 0.0, 1.0])
    return mean, min(mean, low), max(mean, high)


def tallied(keys: Iterable[str], right: Iterable[bool]) -> list[tuple[int, int]]:
    """(right, all) of each key, in the order in which keys appear."""
    found: dict[str, tuple[int, int]] = {}
    for key, one in zip(keys, right, strict=True):
        before = found.get(key, (0, 0))
        found[key] = (before[0] + one, before[1] + 1)
    return list(found.values())


def clustered_share(clusters: Sequence[tuple[int, int]]) -> tuple[float, float, float]:
    """Share of right trials with its 95 % interval: (share, low, high); a cluster is (right, all).

    Pairs or steps of one problem are not independent. This is Wilson's interval of so many trials
    as independent ones would be needed for the variance over clusters: their number over the
    design effect (Kish 1965), at most all. Where all trials are right, or all wrong, there is no
    variance to go by, and each cluster counts as one. Raises `ValueError` without a trial.
    """
    total = sum(count for _, count in clusters)
    if total < 1:
        raise ValueError("clusters hold no trial, expected at least one")
    share = sum(right for right, _ in clusters) / total
    num, alone = len(clusters), share * (1 - share) / total
    trials = float(num)
    if num > 1 and alone > 0:
        squares = math.fsum((right - share * count) ** 2 for right, count in clusters)
        effect = squares * num / (num - 1) / total**2 / alone
        trials = total / max(1.0, effect)
    middle, half = _score_interval(share, trials)
    return share, max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


def standard_error(values: Sequence[float]) -> float | None:
    """s / sqrt(n) of `values`, one per problem, s with n - 1.

    None of a single value, and where all are equal: 0 would claim to know the others too.
    """
    if len(values) < 2 or max(values) == min(values):
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


def paired_proportions(gained: int, lost: int, total: int) -> tuple[float, float, float]:
    """(gained - lost) / total with Tango's 95 % score interval: (difference, low, high).

    `gained` problems only the second model solves, `lost` only the first; of `total` problems
    (Tango 1998, Statistics in Medicine 17, equation 8). Unlike Wald's it has a width where all
    outcomes agree: with none gained or lost it is +-z^2 / (n + z^2). Raises `ValueError` unless
    0 <= gained, lost and gained + lost <= total, total >= 1.
    """
    if total < 1 or min(gained, lost) < 0 or gained + lost > total:
        raise ValueError(
            f"gained {gained}, lost {lost}, total {total}: expected counts of 0 or more that add "
            "up to at most the total, which is at least 1"
        )
    quantile = normal_quantile()
    difference = (gained - lost) / total

    def bound(sign: int) -> float:
        """Where the score is `sign` times the quantile, between the estimate and -sign."""
        end = -sign * (1 - 1e-12)

        def excess(delta: float) -> float:
            return tango_score(delta, gained, lost, total) - sign * quantile

        if excess(end) * sign <= 0:  # at the edge itself nothing is far enough away
            return float(-sign)
        return float(scipy.optimize.brentq(excess, difference * (1 - 1e-12), end, xtol=1e-12))

    return difference, bound(1), bound(-1)


def tango_score(delta: float, gained: int, lost: int, total: int) -> float:
    """How many standard errors the observed difference lies above `delta`, -1 < delta < 1."""
    share = lost_share(delta, gained, lost, total)
    variance = total * (2 * share + delta * (1 - delta))
    above = gained - lost - total * delta
    if variance <= 0:
        return 0.0 if above == 0 else math.copysign(math.inf, above)
    return above / math.sqrt(variance)


def lost_share(delta: float, gained: int, lost: int, total: int) -> float:
    """The likeliest share of lost problems where gained minus lost is `delta` (Tango 1998)."""
    a = 2 * total
    b = -gained - lost + (2 * total - gained + lost) * delta
    c = -lost * delta * (1 - delta)
    return (math.sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a)


def paired_means(differences: Sequence[float]) -> tuple[float, float, float]:
    """Mean of per-problem differences in [-1, 1] with a 95 % interval: (mean, low, high).

    The t-interval of the differences and two more, -1 and +1, moved by nothing and cut to [-1, 1]:
    with a few problems, or with differences that are all equal, the plain t-interval would be far
    too sure of itself. Raises `ValueError` when `differences` is empty.
    """
    if not differences:
        raise ValueError("differences is empty, expected at least one: measure before comparing")
    mean = math.fsum(differences) / len(differences)
    _, low, high = mean_interval([*differences, -1.0, 1.0], bounds=None)
    return mean, max(-1.0, min(mean, low)), min(1.0, max(mean, high))
