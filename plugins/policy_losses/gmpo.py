"""GMPO: the geometric mean of a response's token ratios, clipped token by token (2507.20673)."""

from __future__ import annotations

import torch
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


class GmpoConfig(SequenceRatioConfig):
    """Settings of `gmpo`."""

    log_clip_low: float = Field(
        default=0.4, ge=0, description="log ratios of A < 0 are at least minus this, nats"
    )
    log_clip_high: float = Field(
        default=0.4, ge=0, description="log ratios of A > 0 are at most this, nats"
    )


class GmpoLoss(PolicyLoss[GmpoConfig]):
    """l_i = -A_i exp(mean_t d'_it); d' = min(d, high) if A > 0, max(d, -low) if A < 0.

    d = logprobs - old_logprobs. The response's value stands at each of its tokens [B, T]. A clipped
    token has gradient exactly 0; the others keep theirs, times the geometric mean. An entropy mask
    takes tokens out of the mean, and rollout weights enter as their geometric mean over it.
    Source: Geometric-Mean Policy Optimization, arXiv:2507.20673, eq. 4.
    """

    name = "gmpo"
    idle_at_zero = True
    Config = GmpoConfig
    folds_weights = True
    folds_entropy_mask = True

    def allowed_aggregators(self) -> frozenset[str] | None:
        """One value per response wants the mean over responses."""
        return None if self.config.allow_any_agg else SEQUENCE_AGGREGATORS

    def token_loss(
        self, logprobs: Tensor, micro: RolloutBatch, prepared: Prepared | None = None
    ) -> TokenLoss:
        """Loss [B, T], with the response's ratio and the fractions of clipped tokens as metrics."""
        config, mask = self.config, micro.mask
        kept = mask if micro.entropy_keep is None else masked(mask, micro.entropy_keep)
        signs = masked(micro.column("advantages"), mask)
        log_ratio = ratios.log_ratios(logprobs, micro.column("old_logprobs"), mask)
        capped = torch.where(
            signs > 0,
            log_ratio.clamp(max=config.log_clip_high),
            torch.where(signs < 0, log_ratio.clamp(min=-config.log_clip_low), log_ratio),
        )
        flags = ratios.clip_metrics(
            log_ratio, signs, mask, -config.log_clip_low, config.log_clip_high
        )
        scale = ratios.row_log_ratios(capped, kept, bound=config.ratio_clamp).exp()
        if micro.is_weight is not None:
            # A weight of 0 (a rejected token) makes the geometric mean 0, as log 0 = -inf does.
            weights = ratios.row_log_ratios(masked(micro.is_weight, kept).log(), kept)
            scale = scale * weights.exp()
        advantages = ratios.row_advantages(signs, mask, config.adv_reduce, self.name)
        loss = -advantages * scale
        plain = ratios.row_log_ratios(log_ratio, kept, bound=config.ratio_clamp)
        ratio = masked(plain.expand_as(log_ratio), mask).exp()
        metrics = flags | ratios.ratio_metrics(ratio, log_ratio, mask)
        # A token outside the band is not cut when its advantage pushes it back.
        outside = (log_ratio > config.log_clip_high) | (log_ratio < -config.log_clip_low)
        for name, side in (("pos", signs > 0), ("neg", signs < 0)):
            metrics[f"clip/band_{name}_frac"] = masked((outside & side).to(ratio.dtype), mask)
        return TokenLoss(loss, mask, metrics, ratio)
