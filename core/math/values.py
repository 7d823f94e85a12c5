"""A critic's loss per token, and how much it explains. Axes: B sequences, T tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from posttrain.core.math.masking import masked


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip: float | None = 0.2,
    huber: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Loss [B, T] of `values`, and where [B, T] (bool) the clip decided it.

    max(h(V - R), h(clip(V, V_old - e, V_old + e) - R)) with e = `clip` and h(x) = x^2 / 2, or
    Huber's with `huber` = delta: linear beyond |x| = delta. No gradient where V has moved out of
    the band and the band's end is the worse of the two; `clip` None keeps h(V - R). Masked
    positions may hold anything; their loss is 0 without gradient.
    Sources: PPO's clipped value loss, as in baselines `ppo2` and verl 0.9.1 (e = 0.5 there);
    `huber`: AReaL (delta 10).
    """
    values, target = masked(values, mask), masked(returns, mask)
    free = _error(values - target, huber)
    if clip is None:
        return free, torch.zeros_like(free, dtype=torch.bool)
    anchor = masked(old_values, mask)
    # clamp, not minimum of maximum: at the very end of the band those would halve the gradient.
    held = values.clamp(anchor - clip, anchor + clip)
    bounded = _error(held - target, huber)
    return torch.maximum(free, bounded), (bounded > free).detach()


def _error(gap: Tensor, huber: float | None) -> Tensor:
    """x^2 / 2, or the same up to |x| = `huber` and linear beyond."""
    if huber is None:
        return 0.5 * gap.square()
    return functional.huber_loss(gap, torch.zeros_like(gap), reduction="none", delta=huber)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(R - V) / Var(R) over the masked tokens [B, T]; NaN where Var(R) is below 1e-8.

    1 for a perfect critic, 0 for a constant one, negative for one that is worse than a constant.
    `values` must be those the advantages were made of.
    """
    valid = mask.bool()
    target = returns[valid].double()
    if target.numel() < 2:
        return float("nan")
    spread = target.var(correction=0)
    if spread < 1e-8:
        return float("nan")
    return float(1 - (target - values[valid].double()).var(correction=0) / spread)
