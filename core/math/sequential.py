"""Paired sequential tests that stay valid however often one looks, and whenever one stops.

Pairs d_1, d_2, ... are differences in [-1, 1], one for each problem (or seed) that two variants
share. A gambler who begins with 1 and bets the share c on "the mean is above m" has after n pairs

    K_n(m) = mean over c of prod_i (1 + c (d_i - m) / (1 + m)),    c = 1/64, 3/64, ..., 63/64.

No factor is negative, and where each difference has mean at most m given those before, K is a
nonnegative supermartingale: it ever reaches 1/a with chance a at most (Ville 1939). So

    low_n = the m where K_n(m) = 2/a,    high_n = the same of -d, negated,

hold the mean for all n at once with chance 1 - a: a confidence sequence. Betting on bounded means:
Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", JRSS B 86
(2024), arXiv:2010.09686, section 4; mixing over bets instead of adapting them makes K independent
of the order of the pairs.

Looks at *the same* problems after more training are not new pairs: they repeat one another. Then
look k spends a / (k (k + 1)) of the error, which adds up to a over all looks, whatever they have in
common (`behind_at_look`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
BETS: NDArray[np.float64] = (np.arange(32) + 0.5) / 32
Floats = NDArray[np.float64]


def log_wealth(differences: Sequence[float], mean: float = 0.0) -> float:
    """log K of the bet that the mean is above `mean`; 0 of no pair.

    Raises `ValueError` for a difference outside [-1, 1], and for a `mean` outside (-1, 1).
    """
    found = _log_wealths(_checked(differences), mean)
    return float(_mixed(found.sum(axis=0)))


def confidence_sequence(
    differences: Sequence[float], confidence: float = CONFIDENCE
) -> tuple[float, float, float]:
    """(mean, low, high) after these pairs; valid at every number of pairs at once.

    Raises `ValueError` for no pair.
    """
    d = _checked(differences)
    if not len(d):
        raise ValueError("differences is empty, expected at least one: measure before comparing")
    wanted = math.log(2 / (1 - confidence))
    return float(d.mean()), _low(d, wanted), -_low(-d, wanted)


def first_decision(
    differences: Sequence[float], confidence: float = CONFIDENCE
) -> tuple[int, int] | None:
    """The first number of pairs after which the confidence sequence leaves out 0, and its sign.

    None if it never does: no difference is shown.
    """
    d = _checked(differences)
    wanted = math.log(2 / (1 - confidence))
    above, below = (
        _mixed(np.cumsum(_log_wealths(sign * d, 0.0), axis=0)) >= wanted for sign in (1, -1)
    )
    shown = np.flatnonzero(above | below)
    if not len(shown):
        return None
    first = int(shown[0])
    return first + 1, 1 if above[first] else -1


def behind_at_look(differences: Sequence[float], look: int, confidence: float = CONFIDENCE) -> bool:
    """Whether the mean is below 0, as far as look number `look` (from 1) can say.

    Over all looks, at the same problems or at others, the chance of being wrong once is at most
    1 - confidence. Raises `ValueError` for a look below 1.
    """
    if look < 1:
        raise ValueError(f"look is {look}, expected 1 or more")
    spent = (1 - confidence) / (look * (look + 1))
    return log_wealth([-value for value in differences]) >= math.log(1 / spent)


def _checked(differences: Sequence[float]) -> Floats:
    d = np.asarray(differences, dtype=np.float64)
    if not np.all(np.abs(d) <= 1):  # NaN too
        raise ValueError("a difference is outside [-1, 1]: pairs are differences of shares")
    return d


def _log_wealths(d: Floats, mean: float) -> Floats:
    """log of each pair's factor, for each bet: [pairs, bets]."""
    if not -1 < mean < 1:
        raise ValueError(f"mean is {mean}, expected between -1 and 1")
    return np.asarray(np.log1p(BETS * ((d - mean) / (1 + mean))[:, None]))


def _mixed(logs: Floats) -> Floats:
    """log of the mean over bets, the last axis."""
    top = logs.max(axis=-1, keepdims=True)
    return np.asarray(np.log(np.exp(logs - top).mean(axis=-1)) + top[..., 0])


def _low(d: Floats, wanted: float) -> float:
    """The mean below which the wealth is at least exp(`wanted`); it falls with the mean."""
    low, high = -1.0, float(d.mean())
    for _ in range(60):
        middle = (low + high) / 2
        if middle <= -1.0:
            break
        if float(_mixed(_log_wealths(d, middle).sum(axis=0))) >= wanted:
            low = middle
        else:
            high = middle
    return low
