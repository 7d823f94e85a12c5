"""Importance weights and rejections for samples that another policy drew.

Everything starts from d [B, T] = log trainer - log engine in nats, as `mismatch.log_ratio` gives
it: detached, and 0 where a token takes no part. Axes: B sequences, T tokens. A number per row is
[B, 1]. Sources: IMPALA, arXiv:1802.01561 (truncated weights); verl 0.9.1, `rollout_corr_helper`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from posttrain.core.math.masking import masked, row_means
from posttrain.core.math.mismatch import LOG_BOUND, bounded_exp

WeightLevel = Literal["token", "seq"]
WeightBound = Literal["truncate", "mask"]
Statistic = Literal["k1", "k2", "k3"]
StatisticLevel = Literal["token", "seq_sum", "seq_mean", "seq_max"]


@dataclass(frozen=True, slots=True)
class Weighting:
    """An importance weight per token or per sequence, and what becomes of one out of [low, high].

    `truncate` moves it to the nearest end, `mask` makes it 0. `batch_norm` divides by the mean.
    """

    level: WeightLevel
    bound: WeightBound = "truncate"
    low: float = 0.0
    high: float = math.inf
    batch_norm: bool = False


@dataclass(frozen=True, slots=True)
class Rejection:
    """Keep what has `low` <= statistic <= `high`; the ends are in the statistic's own unit (nats).

    k1 = -d, which has the sign of the *inverse* ratio; k2 = d^2 / 2; k3 = e^d - 1 - d.
    """

    stat: Statistic
    level: StatisticLevel
    high: float
    low: float = -math.inf


def importance_weights(gaps: Tensor, level: WeightLevel) -> Tensor:
    """e^d [B, T], or e^(row sum of d) [B, 1]; exponents are cut to +-20 after the sum."""
    if level == "seq":
        gaps = gaps.sum(dim=1, keepdim=True, dtype=torch.float64).to(gaps.dtype)
    return bounded_exp(gaps)


def bounded_weights(weights: Tensor, weighting: Weighting) -> Tensor:
    """`weights` under `truncate` or `mask`; the ends of [low, high] are inside."""
    if weighting.bound == "truncate":
        return weights.clamp(weighting.low, weighting.high)
    inside = (weights >= weighting.low) & (weights <= weighting.high)
    return masked(weights, inside)


def mean_weight(weights: Tensor, mask: Tensor, level: WeightLevel) -> float:
    """Mean of `weights` [B, T] over the masked tokens, or over the non-empty rows' row means.

    1 when there is nothing to average, or all of it is 0.
    """
    values = weights[mask.bool()]
    if level == "seq":
        values = row_means(weights, mask)[mask.bool().any(dim=1)]
    mean = float(values.double().mean()) if values.numel() else 0.0
    return mean or 1.0


def rejection_statistic(gaps: Tensor, mask: Tensor, rejection: Rejection) -> Tensor:
    """The statistic of each token [B, T], or of each row [B, 1] over its masked tokens.

    d is cut to +-20. A row without tokens has 0, which every sensible rejection keeps.
    """
    clamped = gaps.clamp(-LOG_BOUND, LOG_BOUND)
    if rejection.stat == "k1":
        values = -clamped
    elif rejection.stat == "k2":
        values = 0.5 * clamped.square()
    else:
        # expm1: e^d - 1 - d would lose all digits of a float32 near d = 0.
        values = clamped.expm1() - clamped
    if rejection.level == "token":
        return values
    if rejection.level == "seq_sum":
        rows = masked(values, mask).sum(dim=1, dtype=torch.float64)
    elif rejection.level == "seq_mean":
        rows = row_means(values, mask)
    else:
        lowest = torch.full_like(values, -math.inf)
        rows = torch.where(mask.bool(), values, lowest).amax(dim=1)
        rows = torch.where(mask.bool().any(dim=1), rows, torch.zeros_like(rows))
    return rows[:, None].to(values.dtype)


def within(statistic: Tensor, rejection: Rejection) -> Tensor:
    return (statistic >= rejection.low) & (statistic <= rejection.high)


def off_policy_rows(gaps: Tensor, mask: Tensor, delta: float) -> Tensor:
    """Rows [B, 1] whose mean of anchor - current log-prob (`gaps` [B, T]) is above `delta`.

    Source: DeepSeek-V3.2, arXiv:2512.02556, section 3.1 (off-policy sequence masking).
    """
    return row_means(gaps, mask)[:, None] > delta
