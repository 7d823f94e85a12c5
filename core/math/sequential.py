"""Paired sequential tests that stay valid however often one looks, and whenever one stops.

Pairs d_1, d_2, ... are differences in [-1, 1], one for each problem (or seed) that two variants
share. A gambler who begins with 1 and bets the share c on "the mean is above 0" has after n pairs

    K_n = mean over c of prod_i (1 + c d_i),    c = 1/64, 3/64, ..., 63/64.

No factor is negative, and where each difference has mean at most 0 given those before, K is a
nonnegative supermartingale: it ever reaches 1/a with chance a at most (Ville 1939). Betting on
bounded means: Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting",
JRSS B 86 (2024), arXiv:2010.09686, section 4; mixing over bets instead of adapting them makes K
independent of the order of the pairs.

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


def log_wealth(differences: Sequence[float]) -> float:
    """log K; 0 of no pair. Raises `ValueError` for a difference outside [-1, 1]."""
    d = np.asarray(differences, dtype=np.float64)
    if not np.all(np.abs(d) <= 1):  # NaN too
        raise ValueError("a difference is outside [-1, 1]: pairs are differences of shares")
    logs = np.log1p(BETS * d[:, None]).sum(axis=0)
    top = float(logs.max())
    return math.log(float(np.exp(logs - top).mean())) + top


def behind_at_look(differences: Sequence[float], look: int) -> bool:
    """Whether the mean is below 0, as far as look number `look` (from 1) can say.

    Over all looks, at the same problems or at others, the chance of being wrong once is at most
    1 - `CONFIDENCE`. Raises `ValueError` for a look below 1.
    """
    if look < 1:
        raise ValueError(f"look is {look}, expected 1 or more")
    spent = (1 - CONFIDENCE) / (look * (look + 1))
    return log_wealth([-value for value in differences]) >= math.log(1 / spent)
