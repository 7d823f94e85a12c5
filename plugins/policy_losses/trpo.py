"""TRPO: the surrogate of a step that a trust region bounds (arXiv:1502.05477)."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import PolicyLoss, Prepared, RatioConfig, TokenLoss
from posttrain.core.math import ratios
from posttrain.core.math.masking import masked


class TrpoConfig(RatioConfig):
    """Settings of `trpo`: the size of the region and how its step is found."""

    delta: float = Field(
        default=0.01, gt=0, description="largest mean KL(old || new) of an update, nats"
    )
    damping: float = Field(default=0.1, ge=0, description="added to the Fisher matrix's diagonal")
    cg_iters: int = Field(
        default=10, ge=1, le=10_000, description="conjugate-gradient iterations at most"
    )
    max_backtracks: int = Field(
        default=10,
        ge=0,
        le=1_000,
        description="how often a step that is not accepted is made shorter",
    )
    backtrack_ratio: float = Field(
        default=0.8, gt=0, lt=1, description="factor on the step each time (0.5 is usual too)"
    )
    accept_ratio: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of the expected improvement that a step must reach; 0 = any above 0",
    )
    fvp_token_fraction: float = Field(
        default=0.2, gt=0, le=1, description="share of the tokens that make the Fisher matrix"
    )


class TrpoLoss(PolicyLoss[TrpoConfig]):
    """l = -A r, r = exp(logprobs - old_logprobs): minimised under mean KL(old || new) <= delta.

    All tensors are [B, T]. The loss takes its own optimizer step: the direction solves (F +
    damping) x = -gradient by conjugate gradients, F the Fisher matrix; its length makes the
    quadratic KL equal delta; it is shortened until KL and surrogate agree, or not taken.
    Source: Trust Region Policy Optimization, arXiv:1502.05477, eq. 14 and appendix C.
    """

    name = "trpo"
    Config = TrpoConfig
    owns_update = True

    def token_loss(
        self, logprobs: Tensor, micro: RolloutBatch, prepared: Prepared | None = None
    ) -> TokenLoss:
        """Surrogate loss [B, T], with ratio and KL to the old policy as metrics."""
        mask, bound = micro.mask, self.config.ratio_clamp
        advantages = masked(micro.column("advantages"), mask)
        log_ratio = ratios.log_ratios(logprobs, micro.column("old_logprobs"), mask, bound)
        ratio = log_ratio.exp()
        metrics = ratios.ratio_metrics(ratio, log_ratio, mask)
        return TokenLoss(-advantages * ratio, mask, metrics, ratio)
