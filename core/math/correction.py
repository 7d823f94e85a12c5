"""Importance weights and rejections for samples of another policy, and the mismatch of log-probs.

d = trainer - engine, in nats, over the tokens of a mask whose engine log-prob is known (not NaN).
The samples come from the engine, so exp(d) is an importance weight and k1, k3 estimate
KL(engine || trainer). Everything is summed in float64. Axes: B sequences, T tokens.

Everything starts from d [B, T] = log trainer - log engine in nats, as `mismatch.log_ratio` gives
it: detached, and 0 where a token takes no part. Axes: B sequences, T tokens. A number per row is
[B, 1]. Sources: IMPALA, arXiv:1802.01561 (truncated weights); verl 0.9.1, `rollout_corr_helper`.

`tokens` are [B, T] values over a mask; `rows` one number per sequence. Rows without a token are
left out, or, with `count_empty_seqs`, count with what their empty sum gives (verl). Axes: B
sequences, T tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from posttrain.core.math.masking import masked, row_means, row_sums

LOG_BOUND = 20.0
"""Log-ratios are cut to +-20 nats before exp: a weight stays between 2e-9 and 5e8."""


def known_tokens(engine: Tensor, mask: Tensor) -> Tensor:
    """Which tokens [B, T] take part: those in `mask` whose engine log-prob is not NaN."""
    return mask.bool() & ~engine.isnan()


def log_ratio(trainer: Tensor, engine: Tensor, mask: Tensor) -> Tensor:
    """d [B, T] = trainer - engine, detached; 0 under the mask and where the engine gave none."""
    known = known_tokens(engine, mask)
    return (masked(trainer, known) - masked(engine, known)).detach()


def bounded_exp(log_values: Tensor) -> Tensor:
    """exp of values cut to +-20 nats."""
    return log_values.clamp(-LOG_BOUND, LOG_BOUND).exp()


def effective_sample_size(weights: Tensor) -> float:
    """(sum w)^2 / (N sum w^2) of non-negative `weights` [N]: 1 when equal, 1/N when one has all.

    NaN when there is none, or all are 0. Weights (1, 1, 1, 5) have 0.571429. Source: Kish 1965.
    """
    values = weights.double()
    if values.numel() == 0 or not values.any():
        return float("nan")
    # Divided by the largest first: its square could overflow.
    values = values / values.max()
    return float(values.sum().square() / (values.numel() * values.square().sum()))


def mismatch_metrics(
    trainer: Tensor, engine: Tensor, mask: Tensor, *, count_empty_seqs: bool = False
) -> dict[str, float]:
    """Divergence estimates from log-probs [B, T]; empty when the engine gave none.

    - `mismatch/k1` = mean(-d) and `mismatch/k3` = mean(e^d - 1 - d), per token;
    - `mismatch/abs_mean`, `/abs_max` of |d|, `/prob_abs_max` of |e^trainer - e^engine|;
    - `mismatch/ppl_ratio`, mean over rows of e^(-mean d): trainer's perplexity over the engine's;
    - `mismatch/chi2_token` = mean(e^2d) - 1 and `mismatch/chi2_seq`, the same of the rows' sums;
    - `ess/token`, `ess/seq`: effective sample size of the weights e^d and e^(row sum of d).

    `count_empty_seqs`: rows without a token enter the row means with d = 0, as in verl.
    """
    known = known_tokens(engine, mask)
    if not known.any():
        return {}
    gaps, rows = log_ratio(trainer, engine, mask), counted_rows(known, count_empty_seqs)
    d = gaps[known].double()
    weights, row_weights = bounded_exp(d), bounded_exp(row_sums(gaps, known)[rows])
    probabilities = (trainer[known].double().exp() - engine[known].double().exp()).abs()
    return {
        "mismatch/k1": float(-d.mean()),
        "mismatch/k3": float((weights - 1 - d).mean()),
        "mismatch/abs_max": float(d.abs().max()),
        "mismatch/abs_mean": float(d.abs().mean()),
        "mismatch/prob_abs_max": float(probabilities.max()),
        "mismatch/ppl_ratio": float(bounded_exp(-row_means(gaps, known)[rows]).mean()),
        "mismatch/chi2_token": float(weights.square().mean() - 1),
        "mismatch/chi2_seq": float(row_weights.square().mean() - 1),
        "ess/token": effective_sample_size(weights),
        "ess/seq": effective_sample_size(row_weights),
    }


WeightLevel = Literal["token", "seq"]
WeightBound = Literal["truncate", "mask"]
Statistic = Literal["k1", "k2", "k3", "binary_kl"]
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

    k1 = -d, which has the sign of the *inverse* ratio; k2 = d^2 / 2; k3 = e^d - 1 - d; binary_kl is
    that of the token against the rest, whichever way is larger.
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


def binary_kl(logprobs: Tensor, other: Tensor) -> Tensor:
    """max(b(p, q), b(q, p)) in nats of tokens with log-probs ln p and ln q, of any one shape.

    b(p, q) = p ln(p / q) + (1 - p) ln((1 - p) / (1 - q)), probabilities cut to [1e-6,
    1 - 1e-6]. Exactly 0 where both are equal.
    """
    low, high = math.log(1e-6), math.log1p(-1e-6)
    p, q = (values.double().clamp(low, high) for values in (logprobs, other))
    rest_p, rest_q = (-values.expm1() for values in (p, q))
    gap, rest_gap = p - q, rest_p.log() - rest_q.log()
    forward = p.exp() * gap + rest_p * rest_gap
    backward = -(q.exp() * gap + rest_q * rest_gap)
    return torch.maximum(forward, backward)


def smallest_within_mean(values: Tensor, bound: float) -> Tensor:
    """The largest set [N] of the smallest `values` [N] whose mean is at most `bound`.

    Of equal values the later ones go first. The means of sorted values never fall, so it is those
    up to the last mean within the bound.
    """
    kept = torch.zeros_like(values, dtype=torch.bool)
    order = torch.argsort(values, stable=True)
    means = values[order].cumsum(0) / torch.arange(1, len(values) + 1)
    kept[order[means <= bound]] = True
    return kept


def rejection_statistic(
    gaps: Tensor, mask: Tensor, rejection: Rejection, logprobs: Tensor
) -> Tensor:
    """The statistic of each token [B, T], or of each row [B, 1] over its masked tokens.

    `gaps` are d, cut to +-20, and `logprobs` the trainer's; both [B, T]. A row without tokens has
    0, which every sensible rejection keeps.
    """
    clamped = gaps.clamp(-LOG_BOUND, LOG_BOUND)
    if rejection.stat == "k1":
        values = -clamped
    elif rejection.stat == "k2":
        values = 0.5 * clamped.square()
    elif rejection.stat == "binary_kl":
        own = masked(logprobs.detach(), mask)
        values = binary_kl(own, own - gaps).to(gaps.dtype)
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


def token_spread(values: Tensor, mask: Tensor) -> dict[str, float]:
    """Mean, population standard deviation, least and greatest of `values` [B, T] over the mask."""
    kept = values[mask.bool()].double()
    return {
        "mean": float(kept.mean()),
        "std": float(kept.std(correction=0)),
        "min": float(kept.min()),
        "max": float(kept.max()),
    }


def row_spread(rows: Tensor, centre: float) -> dict[str, float]:
    """Mean, sample standard deviation, least, greatest and greatest distance from `centre`."""
    return {
        "seq_mean": float(rows.mean()),
        "seq_std": float(rows.std()) if rows.numel() > 1 else 0.0,
        "seq_min": float(rows.min()),
        "seq_max": float(rows.max()),
        "seq_max_deviation": float((rows - centre).abs().max()),
    }


def share(flags: Tensor) -> float:
    """The share of true `flags`; 0 of none."""
    return float(flags.double().mean()) if flags.numel() else 0.0


def counted_rows(mask: Tensor, count_empty_seqs: bool) -> Tensor:
    return torch.ones_like(mask[:, 0], dtype=torch.bool) if count_empty_seqs else _filled(mask)


def weight_statistics(
    raw: Tensor,
    weights: Tensor,
    mask: Tensor,
    weighting: Weighting,
    *,
    count_empty_seqs: bool = False,
) -> dict[str, float]:
    """Statistics of bounded `weights` [B, T], and of what they were: `raw` [B, T] or [B, 1].

    - `mean std min max ess` over tokens, `seq_*` over the rows' token means (distance from 1);
    - `raw_min raw_max high_frac low_frac` of the raw weights at their own level, above `high` and
      below `low` (1 / `high` when there is none); `seq_high_frac seq_low_frac` of their row means;
    - `outside_frac`: tokens whose raw weight is out of bounds, when those are masked.
    """
    valid, rows = mask.bool(), counted_rows(mask, count_empty_seqs)
    spread_raw = raw.expand(mask.shape)
    own = raw[:, 0][rows] if weighting.level == "seq" else raw[valid]
    low, high = weighting.low or 1.0 / weighting.high, weighting.high
    row_raw = row_means(spread_raw, mask)[rows]
    result = {
        **token_spread(weights, mask),
        "ess": effective_sample_size(weights[valid]),
        **row_spread(row_means(weights, mask)[rows], centre=1.0),
        "raw_min": float(own.min()),
        "raw_max": float(own.max()),
        "high_frac": share(own > high),
        "low_frac": share(own < low),
        "seq_high_frac": share(row_raw > high),
        "seq_low_frac": share(row_raw < low),
    }
    if weighting.bound == "mask":
        outside = (spread_raw < weighting.low) | (spread_raw > high)
        result["outside_frac"] = share(outside[valid])
    return result


def rejection_statistics(statistic: Tensor, mask: Tensor, rejection: Rejection) -> dict[str, float]:
    """Statistics of one rejection's `statistic`, [B, T] of tokens or [B, 1] of rows.

    - `mean` over tokens, and `std` of the values cut to [low, high], so that outliers do not make
      it; `min max high_frac low_frac` at the statistic's own level;
    - `seq_*` over the non-empty rows, those of a token statistic by their token means;
    - `token_frac` and `seq_frac`: tokens that it drops, and non-empty rows that lose any.
    """
    valid, filled = mask.bool(), _filled(mask)
    per_token = statistic.expand(mask.shape)
    by_row = rejection.level != "token"
    rows = (statistic[:, 0].double() if by_row else row_means(statistic, mask))[filled]
    own = rows if by_row else per_token[valid]
    low, high = rejection.low, rejection.high
    dropped = valid & ~within(per_token, rejection)
    result = {
        "mean": token_spread(per_token, mask)["mean"],
        "std": token_spread(per_token.clamp(low, high), mask)["std"],
        "min": float(own.min()),
        "max": float(own.max()),
        "high_frac": share(own > high),
        "low_frac": share(own < low),
        **row_spread(rows, centre=0.0),
        "seq_high_frac": share(rows > high),
        "token_frac": share(dropped[valid]),
        "seq_frac": share(dropped.any(dim=1)[filled]),
    }
    if low > -math.inf:
        result["seq_low_frac"] = share(rows < low)
    return result


def _filled(mask: Tensor) -> Tensor:
    return mask.bool().any(dim=1)
