"""Returns over time, generalised advantages, and a critic's loss per token.

A position where the mask is 0 (tool output in the middle of a response) is not a time step: the
accumulators are carried past it, neither discounted nor reset, and 0 stands there. Everything is
float64. Axes: B sequences, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from posttrain.core.math.masking import close_gaps, masked, reopen_gaps


@dataclass(frozen=True, slots=True)
class ValuedSteps:
    """Rewards r_t and values V(s_t) [B, T], s_t being the prefix before token t, and the mask.

    `bootstrap` [B] is the value of the state after the last token; 0 where the response ended.
    What lies under the mask is ignored, NaN included.
    """

    rewards: Tensor
    values: Tensor
    mask: Tensor
    bootstrap: Tensor

    @property
    def lengths(self) -> Tensor:
        return self.mask.double().sum(dim=1)


def rewards_to_go(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """G_t = r_t + gamma * G_{t+1} [B, T] over the masked tokens of `rewards` [B, T]."""
    valid, dense = mask.bool(), masked(rewards, mask).double()
    total = dense.new_zeros(dense.shape[0])
    result = torch.zeros_like(dense)
    for t in reversed(range(dense.shape[1])):
        total = torch.where(valid[:, t], dense[:, t] + gamma * total, total)
        result[:, t] = total
    return masked(result, mask)


def gae(steps: ValuedSteps, gamma: float, lam: float | Tensor) -> Tensor:
    """Generalised advantages A_t = delta_t + gamma * lam * A_{t+1} [B, T].

    delta_t = r_t + gamma * V_{t+1} - V_t. `lam` is one number or one per row [B].
    Source: arXiv:1506.02438, eq. 16.
    """
    valid = steps.mask.bool()
    rewards, values = (masked(x, valid).double() for x in (steps.rewards, steps.values))
    next_value = steps.bootstrap.double()
    last = torch.zeros_like(next_value)
    result = torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        here = valid[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        last = torch.where(here, delta + gamma * lam * last, last)
        next_value = torch.where(here, values[:, t], next_value)
        result[:, t] = last
    return masked(result, valid)


def n_step(steps: ValuedSteps, gamma: float, n: int) -> Tensor:
    """A_t = sum over l < n of gamma^l * delta_{t+l} [B, T]; t counts masked tokens only.

    That is sum_{l<n} gamma^l r_{t+l} + gamma^n V_{t+n} - V_t, where nothing lies past the end but
    `bootstrap`. Source: Sutton, Machine Learning 3 (1988).
    """
    ones = torch.ones_like(steps.rewards, dtype=torch.float64)
    deltas, packed = (close_gaps(x, steps.mask) for x in (gae(steps, gamma, 0.0), ones))
    # A window is the sum from t onwards less the discounted sum from t + n onwards.
    onwards = rewards_to_go(deltas, packed, gamma)
    beyond = torch.zeros_like(onwards)
    if n < onwards.shape[1]:
        beyond[:, :-n] = onwards[:, n:]
    return reopen_gaps(onwards - gamma**n * beyond, steps.mask)


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
