"""BAPO: clip bounds chosen at each step to balance positive and negative tokens (2510.18927)."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import PolicyLoss, Prepared, RatioConfig, TokenLoss
from posttrain.core.math import ratios
from posttrain.core.math.bounds import BoundRange, candidates, search
from posttrain.core.math.masking import masked


class BapoConfig(RatioConfig):
    """Settings of `bapo`; bounds are ratios, not distances from 1."""

    low_start: float = Field(default=0.6, ge=0, le=1, description="lower bound at the start")
    low_stop: float = Field(default=0.9, ge=0, le=1, description="largest lower bound")
    low_step: float = Field(default=0.02, gt=0, description="a move of the lower bound")
    high_start: float = Field(default=1.2, ge=1, description="upper bound at the start")
    high_stop: float = Field(default=3.0, ge=1, description="largest upper bound")
    high_step: float = Field(default=0.05, gt=0, description="a move of the upper bound")
    rho0: float = Field(
        default=0.4,
        gt=0,
        description="share of positive tokens to reach (README: 0.5; released: 1)",
    )
    contribution: Literal["gradient", "value_abs", "eq8_literal", "released"] = Field(
        default="gradient",
        description="what a token contributes: its gradient, so that every move helps; its clipped "
        "value; the paper's eq. 8, whose denominator sums signed terms; or the released code's "
        "ratio of positive to negative value, which moves the lower bound first",
    )
    weight: Literal["none", "prob"] = Field(
        default="none", description="prob: weigh tokens by the engine's probability (eq. 8)"
    )
    skip_if_one_sided: bool = Field(
        default=True, description="without a positive token keep the bounds at their start"
    )

    @model_validator(mode="after")
    def _ranges_are_ordered(self) -> BapoConfig:
        if self.low_stop < self.low_start or self.high_stop < self.high_start:
            raise ValueError("low_stop and high_stop must not be below low_start and high_start")
        return self


class BapoLoss(PolicyLoss[BapoConfig]):
    """l = max(-A r, -A clip(r, c_low, c_high)) with bounds of this optimizer step; all [B, T].

    The bounds start over at each step and move, the upper one first, until the share rho = P / (P +
    N) of what positive and negative tokens contribute reaches rho0, or their ranges end. With
    `contribution: gradient` P sums r A over A > 0, r < c_high, and N sums r |A| over A < 0, r >
    c_low. At r = 1 everywhere nothing is clipped and they stay. No gradient flows through them.
    Source: Balanced Policy Optimization with Adaptive Clipping, arXiv:2510.18927, Algorithm 1.
    """

    name = "bapo"
    Config = BapoConfig

    def needs_prepare(self) -> bool:
        """The bounds are of the whole mini-batch."""
        return True

    def prepare(self, mini: RolloutBatch, generator: torch.Generator) -> Prepared:
        """The bounds of this step, from the ratios of all tokens that take loss."""
        config, kept = self.config, mini.mask.bool()
        log_ratio = ratios.log_ratios(
            mini.column("logprobs_now"), mini.column("old_logprobs"), mini.mask
        )
        advantage = mini.column("advantages")[kept].double()
        if config.weight == "prob":
            advantage = advantage * mini.rollout_logprobs[kept].double().exp()
        found = search(
            ratios.clamped(log_ratio, config.ratio_clamp)[kept].double().exp(),
            advantage,
            candidates(
                BoundRange(config.low_start, config.low_stop, config.low_step),
                BoundRange(config.high_start, config.high_stop, config.high_step),
                low_first=config.contribution == "released",
            ),
            config.rho0,
            kind=config.contribution,
            skip_if_one_sided=config.skip_if_one_sided,
        )
        bounds = {"bapo/c_low": found.low, "bapo/c_high": found.high}
        metrics = {**bounds, "bapo/rho": found.share, "bapo/iters": float(found.num_moves)}
        return Prepared(scalars=bounds, metrics=metrics)

    def token_loss(
        self, logprobs: Tensor, micro: RolloutBatch, prepared: Prepared | None = None
    ) -> TokenLoss:
        """Loss [B, T] under the bounds that `prepare` found."""
        assert prepared is not None, "bapo needs what its prepare returns"
        mask, bound = micro.mask, self.config.ratio_clamp
        advantages = masked(micro.column("advantages"), mask)
        log_ratio = ratios.log_ratios(logprobs, micro.column("old_logprobs"), mask, bound)
        ratio = log_ratio.exp()
        low, high = prepared.scalars["bapo/c_low"], prepared.scalars["bapo/c_high"]
        loss = ratios.clipped_loss(ratio, advantages, low, high)
        flags = ratios.clip_metrics(ratio, advantages, mask, low, high)
        metrics = flags | ratios.ratio_metrics(ratio, log_ratio, mask)
        return TokenLoss(loss, mask, metrics, ratio)
