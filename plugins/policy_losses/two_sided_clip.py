"""A clip without regard to the sign of the advantage (Kimi K2.5, arXiv:2602.02276)."""

from __future__ import annotations

from pydantic import Field, model_validator
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import AnchoredConfig, AnchoredLoss, Prepared, TokenLoss
from posttrain.core.math.masking import masked
from posttrain.core.math.ratios import log_ratios, ratio_metrics


class TwoSidedClipConfig(AnchoredConfig):
    """Settings of `two_sided_clip`."""

    low: float = Field(
        default=0.5, ge=0, le=1, description="smallest ratio with a gradient (no published value)"
    )
    high: float = Field(
        default=2.0,
        ge=1,
        le=1_000,
        description="largest ratio with a gradient (no published value)",
    )

    @model_validator(mode="after")
    def _some_room(self) -> TwoSidedClipConfig:
        if self.low == self.high:
            raise ValueError("low and high are both 1, so no token that moved has a gradient")
        return self


class TwoSidedClipLoss(AnchoredLoss[TwoSidedClipConfig]):
    """l = -A clip(r, low, high), r = exp(logprobs - old_logprobs).

    A token whose ratio is out of bounds has no gradient, on whichever side its advantage pushes;
    `ppo_clip` keeps the one that leads back. The published loss has the term `drift` next to it,
    which pulls such tokens back. All tensors are [B, T].
    Source: Kimi K2.5, arXiv:2602.02276, eq. 1; it gives no bounds, so the defaults of low and high
    are a choice of ours.
    """

    name = "two_sided_clip"
    idle_at_zero = True
    Config = TwoSidedClipConfig

    def token_loss(
        self, logprobs: Tensor, micro: RolloutBatch, prepared: Prepared | None = None
    ) -> TokenLoss:
        """Loss [B, T], with ratio, clip fractions and KL to the anchor as metrics."""
        config, mask = self.config, micro.mask
        advantages = masked(micro.column("advantages"), mask)
        log_ratio = log_ratios(logprobs, self.anchor_logprobs(micro), mask, config.ratio_clamp)
        ratio = log_ratio.exp()
        held = ratio.detach()
        over, under = held > config.high, held < config.low
        flags = {"clip/high_frac": over, "clip/low_frac": under, "clip/frac": over | under}
        metrics = {name: masked(flag.to(ratio.dtype), mask) for name, flag in flags.items()}
        metrics |= ratio_metrics(ratio, log_ratio, mask)
        return TokenLoss(-advantages * ratio.clamp(config.low, config.high), mask, metrics, ratio)
