"""The plain policy gradient (Williams 1992, REINFORCE), token by token."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import PluginConfig, PolicyLoss, Prepared, TokenLoss
from posttrain.core.math.masking import masked
from posttrain.core.math.ratios import kl_metrics, log_ratios


class VanillaPgConfig(PluginConfig):
    """Settings of `vanilla_pg`."""

    ratio_form: bool = Field(
        default=False,
        description="write the loss as -A exp(logprobs - sg(logprobs)): the same gradient, and a "
        "value of -A",
    )


class VanillaPgLoss(PolicyLoss[VanillaPgConfig]):
    """l = -A * logprobs: the gradient in a token's log-prob is -A, whatever the policy.

    All tensors are [B, T]. On the first update every other loss of this folder has this gradient.
    It knows no old policy: with stale samples it is biased, unless a bypassed rollout correction
    weighs it. Source: Williams 1992, REINFORCE; the actor of A2C, arXiv:1602.01783, section 4.
    """

    name = "vanilla_pg"
    idle_at_zero = True
    Config = VanillaPgConfig
    needs = frozenset({"advantages"})
    uses_ratio = False

    def token_loss(
        self, logprobs: Tensor, micro: RolloutBatch, prepared: Prepared | None = None
    ) -> TokenLoss:
        """Loss [B, T]; the KL to the old policy is recorded when its log-probs are there."""
        mask = micro.mask
        advantages = masked(micro.column("advantages"), mask)
        new, metrics = masked(logprobs, mask), {}
        if micro.old_logprobs is not None:
            metrics = kl_metrics(log_ratios(logprobs, micro.old_logprobs, mask), mask)
        score = (new - new.detach()).exp() if self.config.ratio_form else new
        return TokenLoss(-advantages * score, mask, metrics)
