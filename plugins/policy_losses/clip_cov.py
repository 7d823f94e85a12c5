"""Clip-Cov: no gradient from a few tokens of high covariance (arXiv:2505.22617, section 4.2)."""

from __future__ import annotations

import torch
from pydantic import Field, model_validator
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import PolicyLoss, Prepared, RatioConfig, TokenLoss
from posttrain.core.math import covariance, ratios
from posttrain.core.math.masking import masked


class ClipCovConfig(RatioConfig):
    """Settings of `clip_cov`."""

    clip_low: float = Field(
        default=0.2, ge=0, le=1, description="ratio floor is 1 - clip_low (the authors run with 1)"
    )
    clip_high: float = Field(
        default=0.2,
        ge=0,
        le=1_000,
        description="ratio ceiling is 1 + clip_high (the authors run with 1)",
    )
    cov_ratio: float = Field(
        default=2e-4, ge=0, le=1, description="share of the mini-batch's tokens to drop"
    )
    cov_low: float = Field(default=1.0, description="a token is dropped above this covariance only")
    cov_high: float = Field(default=5.0, description="and below this one")
    min_k: int = Field(
        default=1, ge=0, description="tokens to drop at least (0: the paper; 1: verl)"
    )

    @model_validator(mode="after")
    def _low_below_high(self) -> ClipCovConfig:
        if self.cov_low >= self.cov_high:
            raise ValueError(
                f"cov_low ({self.cov_low:g}) is not below cov_high ({self.cov_high:g})"
            )
        return self


class ClipCovLoss(PolicyLoss[ClipCovConfig]):
    """PPO's clipped loss, with loss and gradient exactly 0 on K tokens of high covariance.

    c = (A - mean A)(logprobs - mean logprobs) over the tokens [B, T] of the mini-batch, under the
    policy at the start of the step. Of the tokens with cov_low < c < cov_high that PPO's clip
    leaves a gradient, K = max(min_k, floor(cov_ratio * N_tok)) are drawn at random, or all.
    Source: The Entropy Mechanism of RL, arXiv:2505.22617, eq. 10 to 12.
    """

    name = "clip_cov"
    Config = ClipCovConfig

    def needs_prepare(self) -> bool:
        """Means, K and the draw are of the whole mini-batch."""
        return True

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """A random order [count] of the candidates."""
        return torch.randperm(count, generator=generator)

    def dropped(self, mini: RolloutBatch, generator: torch.Generator) -> Tensor:
        """(row, column) [K, 2] of the tokens to drop, in the order they were drawn."""
        config, mask = self.config, mini.mask
        advantages, now = masked(mini.column("advantages"), mask), mini.column("logprobs_now")
        ratio = self._log_ratio(now, mini).exp()
        flags = ratios.clip_metrics(ratio, advantages, mask, *self._bounds())
        value = covariance.token_covariances(advantages, now, mask)
        inside = (value > config.cov_low) & (value < config.cov_high) & mask.bool()
        positions = covariance.ordered_positions(inside & ~flags["clip/frac"].bool(), mini.seq_id)
        order = self.draw(positions.shape[0], generator)
        return positions[order[: covariance.num_picked(config.cov_ratio, mask, config.min_k)]]

    def prepare(self, mini: RolloutBatch, generator: torch.Generator) -> Prepared:
        """`cov_drop` [B, T]: 1 at the tokens to drop."""
        drop = covariance.marked(self.dropped(mini, generator), mini.mask.shape)
        return Prepared(columns={"cov_drop": drop})

    def token_loss(
        self, logprobs: Tensor, micro: RolloutBatch, prepared: Prepared | None = None
    ) -> TokenLoss:
        """Loss [B, T], 0 at the dropped tokens."""
        assert prepared is not None, "clip_cov needs what its prepare returns"
        mask, drop = micro.mask, prepared.columns["cov_drop"]
        advantages = masked(micro.column("advantages"), mask)
        log_ratio = self._log_ratio(logprobs, micro)
        ratio = log_ratio.exp()
        loss = masked(ratios.clipped_loss(ratio, advantages, *self._bounds()), ~drop)
        flags = ratios.clip_metrics(ratio, advantages, mask, *self._bounds())
        metrics = flags | ratios.ratio_metrics(ratio, log_ratio, mask)
        metrics["cov/picked_frac"] = masked(drop.to(ratio.dtype), mask)
        return TokenLoss(loss, mask, metrics, ratio)

    def _log_ratio(self, logprobs: Tensor, batch: RolloutBatch) -> Tensor:
        old, bound = batch.column("old_logprobs"), self.config.ratio_clamp
        return ratios.log_ratios(logprobs, old, batch.mask, bound)

    def _bounds(self) -> tuple[float, float]:
        return 1 - self.config.clip_low, 1 + self.config.clip_high
