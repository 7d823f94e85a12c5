"""FIPO: tokens weighed by how far their future moved (arXiv:2603.19835)."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import PolicyLoss, Prepared, RatioConfig, TokenLoss
from posttrain.core.math import ratios
from posttrain.core.math.masking import masked
from posttrain.core.math.returns import rewards_to_go


class FipoConfig(RatioConfig):
    """Settings of `fipo`; the defaults are those of ms-swift's 32B script."""

    clip_low: float = Field(default=0.2, ge=0, le=1, description="ratio floor is 1 - clip_low")
    clip_high: float = Field(
        default=0.28, ge=0, le=1_000, description="ratio ceiling is 1 + clip_high"
    )
    dual_clip_c: float = Field(
        default=10.0, gt=1, le=1_000_000, description="bound c of the loss where A < 0"
    )
    half_life: float = Field(
        default=32.0, gt=0, description="tokens after which a later one counts half (authors: 128)"
    )
    weight_range: float = Field(
        default=0.2, ge=0, lt=1, description="bound q of |weight - 1|; 0 = weights of 0 to 10"
    )
    high_only: bool = Field(
        default=True, description="weights from 1 on, none below (the authors' code: false)"
    )
    safe_ratio: float = Field(
        default=4.0,
        gt=0,
        description="where A < 0 and the ratio is larger, the weight is at most 1, at least 0.8",
    )
    max_dual_clipped: int | None = Field(
        default=None,
        ge=0,
        description="responses with more dual-clipped tokens take no loss, and counts stay (the "
        "authors' code: 1); null = all do",
    )


class FipoLoss(PolicyLoss[FipoConfig]):
    """l = f_t l_ppo, f_t = sg(clip(exp(F_t), 1, 1 + q)), F_t = sum_{k>=t} 2^(-(k-t)/half_life) e_k.

    e_k is the log ratio, 0 where the token is out of the mask or its ratio is above `dual_clip_c`;
    k - t counts columns, those of observations too. l_ppo is `ppo_clip` with the dual clip. f is
    positive and takes no gradient; on the policy's own samples it is 1, so the first update is
    PPO's. All tensors are [B, T].
    Source: FIPO, arXiv:2603.19835; details as in ms-swift.
    """

    name = "fipo"
    idle_at_zero = True
    stops_gradients = True
    Config = FipoConfig

    def token_loss(
        self, logprobs: Tensor, micro: RolloutBatch, prepared: Prepared | None = None
    ) -> TokenLoss:
        """Loss [B, T], with the weight f, ratio, clip fractions and KL as metrics."""
        config, mask = self.config, micro.mask
        advantages = masked(micro.column("advantages"), mask)
        old, bound = micro.column("old_logprobs"), config.ratio_clamp
        log_ratio = ratios.log_ratios(logprobs, old, mask, bound)
        ratio = log_ratio.exp()
        weight = self.future_weight(log_ratio.detach(), advantages)
        bounds = 1 - config.clip_low, 1 + config.clip_high, config.dual_clip_c
        loss = weight * ratios.clipped_loss(ratio, advantages, *bounds)
        flags = ratios.clip_metrics(ratio, advantages, mask, *bounds)
        if config.max_dual_clipped is not None:
            many = flags["clip/dual_frac"].sum(dim=1, keepdim=True) > config.max_dual_clipped
            loss = masked(loss, ~many.expand_as(mask))
        metrics = flags | ratios.ratio_metrics(ratio, log_ratio, mask)
        metrics["fipo/weight"] = masked(weight, mask)
        return TokenLoss(loss, mask, metrics, ratio)

    def future_weight(self, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        """f [B, T] from detached log ratios, 0 under the mask, and advantages."""
        config = self.config
        ratio, everywhere = log_ratio.exp(), torch.ones_like(log_ratio)
        moved = masked(log_ratio, ratio <= config.dual_clip_c)
        future = rewards_to_go(moved, everywhere, 2 ** (-1 / config.half_life)).to(log_ratio.dtype)
        low, high = 1 - config.weight_range, 1 + config.weight_range
        if config.weight_range == 0:
            low, high = 0.0, 10.0
        weight = future.clamp(max=ratios.METRIC_CLAMP).exp()
        weight = weight.clamp(1.0 if config.high_only else low, high)
        unsafe = (advantages < 0) & (ratio > config.safe_ratio)
        return torch.where(unsafe, weight.clamp(0.8, 1.0), weight)
