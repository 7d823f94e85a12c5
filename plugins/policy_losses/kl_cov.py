"""KL-Cov: a KL penalty on the tokens of highest covariance (arXiv:2505.22617, section 4.2)."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import PolicyLoss, Prepared, RatioConfig, TokenLoss
from posttrain.core.math import covariance, ratios
from posttrain.core.math.masking import masked


class KlCovConfig(RatioConfig):
    """Settings of `kl_cov`."""

    cov_ratio: float = Field(
        default=2e-3,
        ge=0,
        le=1,
        description="share of the mini-batch's tokens to penalise (paper: 2e-3 at 7B, 2e-4 at 32B)",
    )
    kl_coef: float = Field(
        default=1.0, ge=0, le=1_000, description="penalty per nat of |log ratio|"
    )
    min_k: int = Field(
        default=1, ge=0, description="tokens to penalise at least (0: the paper; 1: verl)"
    )


class KlCovLoss(PolicyLoss[KlCovConfig]):
    """l = -A r, plus kl_coef |log r| on the K tokens of highest covariance; all [B, T].

    c = (A - mean A)(logprobs - mean logprobs) over the mini-batch, under the policy at the start of
    the step; K = max(min_k, floor(cov_ratio * N_tok)), ties by (row id, position). There is no
    clip. At r = 1 the penalty has no gradient. Source: The Entropy Mechanism of RL,
    arXiv:2505.22617, eq. 10, 13 and 14.
    """

    name = "kl_cov"
    Config = KlCovConfig

    def needs_prepare(self) -> bool:
        """Means, K and the choice are of the whole mini-batch."""
        return True

    def prepare(self, mini: RolloutBatch, generator: torch.Generator) -> Prepared:
        """`cov_penalised` [B, T]: 1 at the tokens to penalise."""
        mask = mini.mask
        value = covariance.token_covariances(
            mini.column("advantages"), mini.column("logprobs_now"), mask
        )
        count = covariance.num_picked(self.config.cov_ratio, mask, self.config.min_k)
        picked = covariance.highest(value, mask, count, mini.seq_id)
        return Prepared(columns={"cov_penalised": picked})

    def token_loss(
        self, logprobs: Tensor, micro: RolloutBatch, prepared: Prepared | None = None
    ) -> TokenLoss:
        """Loss [B, T], with the penalty where `prepare` put it."""
        assert prepared is not None, "kl_cov needs what its prepare returns"
        mask, penalised = micro.mask, prepared.columns["cov_penalised"]
        advantages = masked(micro.column("advantages"), mask)
        by_token = ratios.log_ratios(logprobs, micro.column("old_logprobs"), mask)
        log_ratio = ratios.clamped(by_token, self.config.ratio_clamp)
        ratio = log_ratio.exp()
        penalty = masked(self.config.kl_coef * by_token.abs(), penalised)
        metrics = ratios.ratio_metrics(ratio, log_ratio, mask)
        metrics["kl/old_abs"] = masked(by_token.detach().abs(), mask)
        metrics["cov/picked_frac"] = masked(penalised.to(ratio.dtype), mask)
        return TokenLoss(penalty - advantages * ratio, mask, metrics, ratio)
