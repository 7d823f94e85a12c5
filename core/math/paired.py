"""95 % intervals of the difference between two models measured on the same problems.

Two answers to one problem are not independent, so each problem is compared with itself: what
decides is how many problems one model alone solves, not how many each solves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import scipy  # its submodules load at first use: 0.5 s that a start does not wait for

from posttrain.core.math.intervals import CONFIDENCE, mean_interval


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
    quantile = float(scipy.stats.norm.ppf((1 + CONFIDENCE) / 2))
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
