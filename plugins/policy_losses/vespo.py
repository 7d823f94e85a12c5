"""VESPO: a smooth weight on the likelihood ratio of whole responses (as TRL has it)."""

from __future__ import annotations

import math

import torch
from pydantic import Field
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import PolicyLoss, Prepared, RatioConfig, TokenLoss
from posttrain.core.math import ratios
from posttrain.core.math.masking import masked, row_means, row_sums

LOWEST = math.log(1e-8)  # of log w, nats: there the weight is 0 to float precision


class VespoConfig(RatioConfig):
    """Settings of `vespo`; `ratio_clamp` bounds each token, and the sum from above."""

    mask_weights: bool = Field(
        default=True,
        description="leave out the rollout weights under the mask; false: they enter w as well "
        "(TRL, whose weights are 1 there; ours are 0)",
    )
    k_pos: float = Field(default=2.0, ge=0, description="power of w where A >= 0")
    lambda_pos: float = Field(default=3.0, ge=0, description="decay in w where A >= 0")
    k_neg: float = Field(default=3.0, ge=0, description="power of w where A < 0")
    lambda_neg: float = Field(default=2.0, ge=0, description="decay in w where A < 0")


class VespoLoss(PolicyLoss[VespoConfig]):
    """l = -A sg(phi(w_i)) logprobs, phi(w) = w^k exp(lambda (1 - w)), so phi(1) = 1.

    w_i = exp(sum_t(logprobs - old_logprobs) + sum_t log is_weight) is of the whole response: a
    rollout weight enters it and does not multiply the loss. (k, lambda) depend on the sign of A.
    All tensors are [B, T]; the gradient in a token's log-prob is -A phi.
    Source: variational sequence-level soft policy optimisation, as in TRL's `loss_type: vespo`.
    """

    name = "vespo"
    idle_at_zero = True
    Config = VespoConfig
    stops_gradients = True
    folds_weights = True

    def token_loss(
        self, logprobs: Tensor, micro: RolloutBatch, prepared: Prepared | None = None
    ) -> TokenLoss:
        """Loss [B, T], with the response's ratio and phi as metrics."""
        config, mask = self.config, micro.mask
        bound = config.ratio_clamp
        advantages = masked(micro.column("advantages"), mask)
        by_token = ratios.log_ratios(logprobs, micro.column("old_logprobs"), mask)
        total = row_sums(ratios.clamped(by_token, bound), mask)
        if micro.is_weight is not None:
            # A weight of 0 (a rejected token) has no logarithm; LOWEST takes its place.
            where = mask if config.mask_weights else torch.ones_like(mask)
            weights = masked(micro.is_weight, where).clamp(min=math.exp(LOWEST))
            total = total + row_sums(weights.log(), where)
        log_w = total.clamp(min=LOWEST, max=bound).to(by_token.dtype)[:, None]
        good = (advantages >= 0).long()
        k = by_token.new_tensor([config.k_neg, config.k_pos])[good]
        decay = by_token.new_tensor([config.lambda_neg, config.lambda_pos])[good]
        held = log_w.detach()
        phi = (decay + k * held - decay * held.exp()).exp()
        ratio = masked(log_w.expand_as(by_token), mask).exp()
        metrics = ratios.ratio_metrics(ratio, by_token, mask)
        # An empty row has w = 1.
        of_rows = torch.where(mask.bool().any(dim=1), row_means(phi, mask), 1.0)
        metrics["vespo/phi"] = of_rows.to(phi.dtype)
        return TokenLoss(-advantages * phi * masked(logprobs, mask), mask, metrics, ratio)
