"""Statistics of importance weights and of rejections, for the record.

`tokens` are [B, T] values over a mask; `rows` one number per sequence. Rows without a token are
left out, or, with `count_empty_seqs`, count with what their empty sum gives (verl). Axes: B
sequences, T tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posttrain.core.math.correction import Rejection, Weighting, within
from posttrain.core.math.masking import row_means
from posttrain.core.math.mismatch import effective_sample_size


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
