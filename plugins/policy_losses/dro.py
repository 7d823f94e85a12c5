"""DRO: a policy gradient with a quadratic pull to the old policy (arXiv:2405.19107)."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import PluginConfig, PolicyLoss, Prepared, TokenLoss
from posttrain.core.math import ratios
from posttrain.core.math.masking import masked


class DroConfig(PluginConfig):
    """Settings of `dro`."""

    beta: float = Field(
        default=0.1, ge=0, le=1_000, description="strength of the pull, per squared nat"
    )


class DroLoss(PolicyLoss[DroConfig]):
    """l = -(A logprobs - 0.5 beta d^2), d = logprobs - old_logprobs.

    All tensors are [B, T]. The gradient in a token's log-prob is -(A - beta d): no ratio weighs it,
    so it has neither clip nor overflow. Source: after Direct Reward Optimisation, arXiv:2405.19107;
    the token form is verl's.
    """

    name = "dro"
    Config = DroConfig
    uses_ratio = False

    def token_loss(
        self, logprobs: Tensor, micro: RolloutBatch, prepared: Prepared | None = None
    ) -> TokenLoss:
        """Loss [B, T], with the KL to the old policy as metrics."""
        mask = micro.mask
        advantages = masked(micro.column("advantages"), mask)
        log_ratio = ratios.log_ratios(logprobs, micro.column("old_logprobs"), mask)
        pull = 0.5 * self.config.beta * log_ratio.square()
        loss = pull - advantages * masked(logprobs, mask)
        return TokenLoss(loss, mask, ratios.kl_metrics(log_ratio, mask))
