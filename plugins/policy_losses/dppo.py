"""DPPO: a trust region in probability, token by token, instead of a clip (arXiv:2602.04879)."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import AnchoredConfig, AnchoredLoss, Prepared, TokenLoss
from posttrain.core.math import ratios
from posttrain.core.math.masking import masked


class DppoConfig(AnchoredConfig):
    """Settings of `dppo`."""

    divergence: Literal["tv", "kl"] = Field(
        default="tv", description="what is bounded: |p - p_old|, or the KL of token against rest"
    )
    delta_low: float = Field(
        default=0.2, ge=0, description="bound below, where A <= 0: probability (tv) or nats (kl)"
    )
    delta_high: float = Field(
        default=0.2, ge=0, description="bound above, where A > 0: probability (tv) or nats (kl)"
    )
    sided: Literal["one", "both"] = Field(
        default="one",
        description="one: leave out tokens on the side that their advantage pushes to; both: all "
        "that are out of bounds (prime-rl's `ipo`, with bounds of 0.1)",
    )
    ratio_max: float | None = Field(
        default=3.0, gt=0, description="cap of the importance weight; null = none (prime-rl)"
    )
    anchor: Literal["old", "rollout"] = Field(
        default="rollout",
        description="the policy that the region is around: the engine's (the paper; then use no "
        "rollout weight), or the trainer's of before the update (verl)",
    )


class DppoLoss(AnchoredLoss[DppoConfig]):
    """l = -A sg(min(r, c)) logprobs, and 0 for a token that would leave the region further.

    p = exp(logprobs), p_old and r = p / p_old are against the anchor. A token is out when it is on
    the side that its advantage pushes to (p > p_old for A > 0, else p < p_old) and its divergence
    exceeds the bound; with `sided: both` on either side. tv: |p - p_old|; kl: p_old log(p_old / p)
    + (1 - p_old) log((1 - p_old) / (1 - p)). All tensors are [B, T]; nothing flows through r or the
    choice.
    Source: Divergence PPO, arXiv:2602.04879.
    """

    name = "dppo"
    idle_at_zero = True
    Config = DppoConfig
    stops_gradients = True

    def token_loss(
        self, logprobs: Tensor, micro: RolloutBatch, prepared: Prepared | None = None
    ) -> TokenLoss:
        """Loss [B, T], with ratio, the fractions left out and KL to the anchor as metrics."""
        config, mask = self.config, micro.mask
        advantages = masked(micro.column("advantages"), mask)
        behaviour = self.anchor_logprobs(micro)
        new, old = masked(logprobs, mask), masked(behaviour, mask)
        log_ratio = ratios.log_ratios(logprobs, behaviour, mask, config.ratio_clamp)
        ratio = log_ratio.exp()
        divergence = self._divergence(new.detach().exp(), old.exp(), log_ratio.detach())
        rises, shift = advantages > 0, new.detach() - old
        both = config.sided == "both"
        over = (rises | both) & (shift > 0) & (divergence > config.delta_high)
        under = (~rises | both) & (shift < 0) & (divergence > config.delta_low)
        cap = math.inf if config.ratio_max is None else config.ratio_max
        flags = {
            "clip/high_frac": over,
            "clip/low_frac": under,
            "clip/frac": over | under,
            "clip/dual_frac": ~(over | under) & (ratio.detach() > cap),
        }
        metrics = {name: masked(flag.to(ratio.dtype), mask) for name, flag in flags.items()}
        weight = masked(ratio.detach().clamp(max=cap), ~flags["clip/frac"])
        metrics |= ratios.ratio_metrics(ratio, log_ratio, mask)
        return TokenLoss(-advantages * weight * new, mask, metrics, ratio)

    def _divergence(self, new: Tensor, old: Tensor, log_ratio: Tensor) -> Tensor:
        """Divergence [B, T] from the probabilities of the sampled tokens."""
        if self.config.divergence == "tv":
            return (new - old).abs()
        rest = ((1 - old + 1e-8) / (1 - new + 1e-8)).log()
        return -old * log_ratio + (1 - old) * rest
