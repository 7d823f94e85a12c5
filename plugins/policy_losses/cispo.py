"""CISPO: the policy gradient under a clipped, detached importance weight (arXiv:2506.13585)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import AnchoredConfig, AnchoredLoss, Prepared, TokenLoss
from posttrain.core.math import ratios
from posttrain.core.math.masking import masked


class CispoConfig(AnchoredConfig):
    """Settings of `cispo`."""

    clip_low: float = Field(
        default=1.0, ge=0, description="weight floor is 1 - clip_low; 1 or more = none (verl: 0.2)"
    )
    clip_high: float = Field(
        default=4.0, ge=0, le=1_000, description="weight ceiling is 1 + clip_high (verl: 0.2)"
    )
    weight_max: float | None = Field(
        default=None,
        gt=0,
        le=1_000_000,
        description="the ceiling itself (TRL's epsilon_high); null = clip_high's",
    )
    ratio_level: Literal["token", "sequence"] = Field(
        default="token",
        description="one weight per token, or per response the mean log ratio's (TRL)",
    )


class CispoLoss(AnchoredLoss[CispoConfig]):
    """l = -A sg(clip(r, 1 - clip_low, 1 + clip_high)) logprobs, r against the old policy.

    All tensors are [B, T]. The gradient in a token's log-prob is -A times the clipped ratio, so a
    clipped token keeps its gradient: that is the point.
    Source: MiniMax-M1, arXiv:2506.13585, eq. 4 and 5.
    """

    name = "cispo"
    idle_at_zero = True
    Config = CispoConfig
    stops_gradients = True

    def token_loss(
        self, logprobs: Tensor, micro: RolloutBatch, prepared: Prepared | None = None
    ) -> TokenLoss:
        """Loss [B, T], with ratio, bounded fractions and KL to the anchor as metrics."""
        config, mask = self.config, micro.mask
        advantages = masked(micro.column("advantages"), mask)
        behaviour = self.anchor_logprobs(micro)
        by_token = ratios.log_ratios(logprobs, behaviour, mask)
        ratio = ratios.at_level(by_token, mask, config.ratio_level, config.ratio_clamp).exp()
        low = 1 - config.clip_low
        high = 1 + config.clip_high if config.weight_max is None else config.weight_max
        weight = ratio.detach().clamp(low, high)
        metrics = ratios.clip_metrics(ratio, advantages, mask, low, high)
        # A bound acts whatever the sign of the advantage here.
        bounded = (weight != ratio.detach()).to(ratio.dtype)
        metrics["clip/frac"] = masked(bounded, mask)
        log_ratio = ratios.clamped(by_token, config.ratio_clamp)
        metrics |= ratios.ratio_metrics(ratio, log_ratio, mask)
        return TokenLoss(-advantages * weight * masked(logprobs, mask), mask, metrics, ratio)
