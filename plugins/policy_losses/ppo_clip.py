"""PPO's clipped token loss (arXiv:1707.06347, eq. 7), with DAPO's two bounds and the dual clip."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import (
    SEQUENCE_AGGREGATORS,
    PolicyLoss,
    Prepared,
    SequenceRatioConfig,
    TokenLoss,
)
from posttrain.core.math import ratios, segments
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
    ratio_level: Literal["token", "segment", "sequence"] = Field(
        default="token",
        description="one ratio per token, per segment of a response, or per response: the mean log "
        "ratio's (GSPO)",
    )
    segment_by: Literal["width", "turn", "ends"] = Field(
        default="width",
        description="with ratio_level: segment, where one ends: after segment_width tokens, with a "
        "turn, or with one of the tokens segment_ends",
    )
    segment_width: int = Field(default=256, ge=1, description="sampled tokens of a segment")
    segment_ends: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(), description="ids of tokens that end a segment, such as that of a line's end"
    )
    mask_behind: bool = Field(
        default=False,
        description="no loss for tokens behind the first clipped one of a response; they were "
        "sampled after text that the policy has moved away from. Counts stay",
    )

    @model_validator(mode="after")
    def _segments_end(self) -> PpoClipConfig:
        if self.segment_by == "ends" and not self.segment_ends:
            raise ValueError("segment_by: ends needs the ids of the tokens that end a segment")
        return self


class PpoClipLoss(PolicyLoss[PpoClipConfig]):
    """l = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = exp(logprobs - old_logprobs).

    With `dual_clip_c: c` and A < 0: min(l, -A c). All tensors are [B, T]; masked tokens have loss 0
    and gradient 0 whatever they hold. The gradient in the log ratio is -r A, and exactly 0 where
    A > 0 and r > 1 + clip_high, where A < 0 and r < 1 - clip_low, and where A < 0 and r > c.
    With `ratio_level: segment` r is exp(mean log ratio) of the token's segment, with gradient -A r
    / n to each of its n tokens, per unit of the segment's loss.
    Sources: PPO arXiv:1707.06347 eq. 7; dual clip arXiv:1912.09729 eq. 5; two bounds: DAPO
    arXiv:2503.14476 eq. 8; segments: SSPO, arXiv:2511.04256, whose bounds follow the entropy by a
    rule that was found in no source: here they are fixed, and their values are a choice of ours.
    """

    name = "ppo_clip"
    idle_at_zero = True
    Config = PpoClipConfig

    def allowed_aggregators(self) -> frozenset[str] | None:
        """Any for ratios of tokens; one value for many tokens wants the mean over responses."""
        by_row = self.config.ratio_level != "token" and not self.config.allow_any_agg
        return SEQUENCE_AGGREGATORS if by_row else None

    def token_loss(
        self, logprobs: Tensor, micro: RolloutBatch, prepared: Prepared | None = None
    ) -> TokenLoss:
        """Loss [B, T], with ratio, clip fractions and KL to the sampling policy as metrics."""
        config, mask = self.config, micro.mask
        advantages = masked(micro.column("advantages"), mask)
        by_token = ratios.log_ratios(logprobs, micro.column("old_logprobs"), mask)
        if config.ratio_level == "segment":
            advantages, log_ratio = self._of_segments(advantages, by_token, micro)
        else:
            if config.ratio_level == "sequence":
                advantages = ratios.row_advantages(advantages, mask, config.adv_reduce, self.name)
            log_ratio = ratios.at_level(by_token, mask, config.ratio_level, config.ratio_clamp)
        ratio = log_ratio.exp()
        bounds = 1 - config.clip_low, 1 + config.clip_high, config.dual_clip_c
        loss = ratios.clipped_loss(ratio, advantages, *bounds)
        flags = ratios.clip_metrics(ratio, advantages, mask, *bounds)
        clipped = (flags["clip/frac"] + flags["clip/dual_frac"]).bool()
        behind = segments.behind(clipped)
        if config.mask_behind:
            loss = masked(loss, ~behind)
        live = behind & ~clipped & (advantages != 0)
        flags["clip/live_behind_frac"] = masked(live.to(ratio.dtype), mask)
        old_gap = ratios.clamped(by_token, config.ratio_clamp)
        metrics = flags | ratios.ratio_metrics(ratio, old_gap, mask)
        if config.ratio_level != "token":
            metrics["clip/seq_frac"] = ratios.row_flags(flags["clip/frac"], mask)
        return TokenLoss(loss, mask, metrics, ratio)

    def _of_segments(
        self, advantages: Tensor, by_token: Tensor, micro: RolloutBatch
    ) -> tuple[Tensor, Tensor]:
        """Advantages and clamped log ratios [B, T], one of each per segment."""
        config, mask = self.config, micro.mask
        if config.segment_by == "width":
            segment = segments.by_width(mask, config.segment_width)
        elif config.segment_by == "turn":
            segment = segments.by_run(mask)
        else:
            segment = segments.by_end(micro.response_ids, mask, config.segment_ends)
        mean = config.adv_reduce == "mean"
        advantages = segments.segment_advantages(
            advantages, mask, segment, take_mean=mean, who=self.name
        )
        log_ratio = segments.segment_means(by_token, mask, segment).to(by_token.dtype)
        return advantages, ratios.clamped(log_ratio, config.ratio_clamp)
