"""SAPO: a smooth gate on the ratio instead of a clip (arXiv:2511.20347, eq. 5 and 6)."""

from __future__ import annotations

from typing import Literal

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


class SapoConfig(SequenceRatioConfig):
    """Settings of `sapo`."""

    tau_pos: float = Field(default=1.0, gt=0, description="steepness of the gate where A > 0")
    tau_neg: float = Field(
        default=1.05, gt=0, description="steepness where A <= 0; larger trusts bad tokens less"
    )
    ratio_level: Literal["token", "sequence"] = Field(
        default="token",
        description="one ratio per token, or per response the mean log ratio's (TRL)",
    )


class SapoLoss(PolicyLoss[SapoConfig]):
    """l = -A f(r), f(r) = (4 / tau) sigmoid(tau (r - 1)), tau = tau_pos if A > 0 else tau_neg.

    All tensors are [B, T]. The gradient in a token's log-prob is -A r sech^2(tau (r - 1) / 2): that
    of the policy gradient at r = 1, fading on both sides and never 0.
    Source: Soft Adaptive Policy Optimization, arXiv:2511.20347, eq. 5 and 6, section 5.1.
    """

    name = "sapo"
    idle_at_zero = True
    Config = SapoConfig

    def allowed_aggregators(self) -> frozenset[str] | None:
        """Any for ratios of tokens; one value per response wants the mean over responses."""
        by_row = self.config.ratio_level == "sequence" and not self.config.allow_any_agg
        return SEQUENCE_AGGREGATORS if by_row else None

    def token_loss(
        self, logprobs: Tensor, micro: RolloutBatch, prepared: Prepared | None = None
    ) -> TokenLoss:
        """Loss [B, T], with ratio and KL to the sampling policy as metrics."""
        config, mask = self.config, micro.mask
        advantages = masked(micro.column("advantages"), mask)
        by_token = ratios.log_ratios(logprobs, micro.column("old_logprobs"), mask)
        if config.ratio_level == "sequence":
            advantages = ratios.row_advantages(advantages, mask, config.adv_reduce, self.name)
        ratio = ratios.at_level(by_token, mask, config.ratio_level, config.ratio_clamp).exp()
        taus = ratio.new_tensor([config.tau_neg, config.tau_pos])
        tau = taus[(advantages > 0).long()]
        gate = torch.sigmoid(tau * (ratio - 1))
        log_ratio = ratios.clamped(by_token, config.ratio_clamp)
        metrics = ratios.ratio_metrics(ratio, log_ratio, mask)
        return TokenLoss(-advantages * gate * 4 / tau, mask, metrics, ratio)
