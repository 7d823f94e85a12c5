"""Importance ratios of tokens and responses, and the straight-through estimator.

Axes: B sequences, T tokens. Log-probs and log ratios are in nats. Nothing under the mask matters,
NaN included: inputs are masked before any exp.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from posttrain.core.errors import RunError
from posttrain.core.math.masking import masked, row_means, row_sums

METRIC_CLAMP = 20.0  # bound of log ratios in metrics alone, so that one token cannot make them inf


def log_ratios(new: Tensor, old: Tensor, mask: Tensor, bound: float | None = None) -> Tensor:
    """log r [B, T] = `new` - `old`, `clamped`, 0 under the mask; gradient through `new` alone."""
    return clamped(masked(new, mask) - masked(old.detach(), mask), bound)


def clamped(log_ratio: Tensor, bound: float | None) -> Tensor:
    """`log_ratio` within +-`bound` nats, without gradient beyond; None = as it is."""
    return log_ratio if bound is None else log_ratio.clamp(-bound, bound)


def row_log_ratios(
    log_ratio: Tensor,
    mask: Tensor,
    *,
    reduce: Literal["mean", "sum"] = "mean",
    bound: float | None = None,
) -> Tensor:
    """log s [B, 1] of whole responses: mean or sum of their tokens' `log_ratio` [B, T], clamped.

    The tokens' values are summed unclamped, in float64. An empty row has log s = 0.
    """
    total = (row_means if reduce == "mean" else row_sums)(log_ratio, mask)
    return clamped(total, bound).to(log_ratio.dtype)[:, None]


def at_level(
    log_ratio: Tensor, mask: Tensor, level: Literal["token", "sequence"], bound: float | None
) -> Tensor:
    """The clamped log ratio [B, T] that a token's loss is made of.

    Its own, or the mean of its response's (GSPO's s_i), with gradient to every token of it.
    """
    if level == "token":
        return clamped(log_ratio, bound)
    return masked(row_log_ratios(log_ratio, mask, bound=bound).expand_as(log_ratio), mask)


def row_advantages(
    advantages: Tensor, mask: Tensor, reduce: Literal["none", "mean"], who: str
) -> Tensor:
    """`advantages` [B, T] with one value per row: as they are, or each row's mean."""
    means = masked(row_means(advantages, mask).to(advantages.dtype)[:, None], mask)
    if reduce == "mean":
        return means
    spread = masked(advantages - means, mask).abs()
    if bool((spread > 1e-6 * means.abs().clamp(min=1)).any()):
        raise RunError(
            f"{who} has one importance ratio per response, but the advantages differ between the "
            "tokens of a response: use gspo_token, or set adv_reduce: mean"
        )
    return advantages


def clipped_loss(
    ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None = None
) -> Tensor:
    """max(-A r, -A clip(r, low, high)) [B, T], and with `dual` c at most -A c where A < 0.

    The gradient in log r is -r A, and exactly 0 where A > 0 and r > high, where A < 0 and r < low,
    and where A < 0 and r > c.
    """
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    if dual is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * dual), loss)


def clip_metrics(
    ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    low: float,
    high: float,
    dual: float | None = None,
) -> dict[str, Tensor]:
    """0/1 flags [B, T] of tokens that `clipped_loss` gives no gradient, by the bound at fault."""
    held = ratio.detach()
    over, under = (advantages > 0) & (held > high), (advantages < 0) & (held < low)
    beyond = (advantages < 0) & (held > (float("inf") if dual is None else dual))
    flags = {
        "clip/high_frac": over,
        "clip/low_frac": under,
        "clip/frac": over | under,
        "clip/dual_frac": beyond,
    }
    return {name: masked(flag.to(ratio.dtype), mask) for name, flag in flags.items()}


def ratio_metrics(ratio: Tensor, log_ratio: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Metrics [B, T] of every loss with a ratio, 0 under the mask.

    `ratio` is the loss's own and `log_ratio` the tokens'.
    """
    return {"ratio": masked(ratio.detach(), mask), **kl_metrics(log_ratio, mask)}


def kl_metrics(log_ratio: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """k1 and k3 estimates [B, T] of the KL from the old policy, from `log_ratio` = new - old."""
    detached = log_ratio.detach()
    bounded = clamped(detached, METRIC_CLAMP)
    return {
        "kl/old_k1": masked(-detached, mask),
        "kl/old_k3": masked(bounded.expm1() - bounded, mask),
    }


def row_flags(flags: Tensor, mask: Tensor) -> Tensor:
    """1 for the rows [B] with a masked token whose flag [B, T] is set, else 0."""
    return masked(flags, mask).amax(dim=1)


def straight_through(value: Tensor, surrogate: Tensor) -> Tensor:
    """`value` forward, bit for bit, and the gradient of `surrogate` backward; of one shape.

    Source: Bengio, Leonard, Courville 2013, arXiv:1308.3432, section 2 (the estimator's name).
    """
    # (surrogate - itself) first: it is exactly 0, so the value keeps all its bits.
    return value.detach() + (surrogate - surrogate.detach())
