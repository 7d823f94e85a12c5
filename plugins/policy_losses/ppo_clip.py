"""PPO's clipped token loss (arXiv:1707.06347, eq. 7), with DAPO's two bounds and the dual clip."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import (
    SEQUENCE_AGGREGATORS,
    PolicyLoss,
    Prepared,
    SequenceRatioConfig,
    TokenLoss,
)
from posttrain.core.math import ratios
from posttrain.core.math.masking import masked


class PpoClipConfig(SequenceRatioConfig):
    """Settings of `ppo_clip`, and of `dual_clip` and `gspo`, which differ in defaults."""

    clip_low: float = Field(default=0.2, ge=0, le=1, description="ratio floor is 1 - clip_low")
    clip_high: float = Field(
        default=0.2, ge=0, le=1_000, description="ratio ceiling is 1 + clip_high (DAPO: 0.28)"
    )
    dual_clip_c: float | None = Field(
        default=None,
        gt=1,
        le=1_000_000,
        description="bound c of the loss where A < 0 (usual: 3); null = off",
    )
    ratio_level: Literal["token", "sequence"] = Field(
        default="token",
        description="one ratio per token, or per response the mean log ratio's (GSPO)",
    )


class PpoClipLoss(PolicyLoss[PpoClipConfig]):
    """l = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = exp(logprobs - old_logprobs).

    With `dual_clip_c: c` and A < 0: min(l, -A c). All tensors are [B, T]; masked tokens have loss 0
    and gradient 0 whatever they hold. The gradient in the log ratio is -r A, and exactly 0 where
    A > 0 and r > 1 + clip_high, where A < 0 and r < 1 - clip_low, and where A < 0 and r > c.
    Sources: PPO arXiv:1707.06347 eq. 7; dual clip arXiv:1912.09729 eq. 5; two bounds: DAPO
    arXiv:2503.14476 eq. 8.
    """

    name = "ppo_clip"
    idle_at_zero = True
    Config = PpoClipConfig

    def allowed_aggregators(self) -> frozenset[str] | None:
        """Any for ratios of tokens; one value per response wants the mean over responses."""
        by_row = self.config.ratio_level == "sequence" and not self.config.allow_any_agg
        return SEQUENCE_AGGREGATORS if by_row else None

    def token_loss(
        self, logprobs: Tensor, micro: RolloutBatch, prepared: Prepared | None = None
    ) -> TokenLoss:
        """Loss [B, T], with ratio, clip fractions and KL to the sampling policy as metrics."""
        config, mask = self.config, micro.mask
        advantages = masked(micro.column("advantages"), mask)
        by_token = ratios.log_ratios(logprobs, micro.column("old_logprobs"), mask)
        if config.ratio_level == "sequence":
            advantages = ratios.row_advantages(advantages, mask, config.adv_reduce, self.name)
        log_ratio = ratios.at_level(by_token, mask, config.ratio_level, config.ratio_clamp)
        ratio = log_ratio.exp()
        bounds = 1 - config.clip_low, 1 + config.clip_high, config.dual_clip_c
        loss = ratios.clipped_loss(ratio, advantages, *bounds)
        flags = ratios.clip_metrics(ratio, advantages, mask, *bounds)
        old_gap = ratios.clamped(by_token, config.ratio_clamp)
        metrics = flags | ratios.ratio_metrics(ratio, old_gap, mask)
        if config.ratio_level == "sequence":
            metrics["clip/seq_frac"] = ratios.row_flags(flags["clip/frac"], mask)
        return TokenLoss(loss, mask, metrics, ratio)
