"""A pull to another policy in log-probs, next to a policy loss (as in prime-rl, Kimi K2.5)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import AnchoredConfig, AnchoredLoss, Prepared, TokenLoss
from posttrain.core.math.ratios import kl_metrics, log_ratios


class DriftConfig(AnchoredConfig):
    """Settings of `drift`."""

    anchor: Literal["old", "rollout"] = Field(
        default="rollout",
        description="the policy that tokens are pulled to: the engine's, or the trainer's of "
        "before the update",
    )


class DriftLoss(AnchoredLoss[DriftConfig]):
    """l = ln(r)^2, r = exp(logprobs - anchor's log-probs): twice the k2 estimate of the KL.

    The gradient in a token's log-prob is 2 ln r, whatever its advantage is, so that tokens which
    the policy loss next to it leaves out are pulled back. Its factor is the term's `coef` (0.001 in
    prime-rl). No rollout weight multiplies it. All tensors are [B, T].
    Sources: the default loss of prime-rl 559b44772; Kimi K2.5, arXiv:2602.02276, eq. 1.
    """

    name = "drift"
    Config = DriftConfig
    uses_ratio = False
    folds_weights = True  # a pull is not an expectation over the sampler's tokens

    def required_columns(self) -> frozenset[str]:
        """The anchor's log-probs alone."""
        return super().required_columns() - {"advantages"}

    def token_loss(
        self, logprobs: Tensor, micro: RolloutBatch, prepared: Prepared | None = None
    ) -> TokenLoss:
        """Loss [B, T], with the KL from the anchor as metrics."""
        mask = micro.mask
        bound = self.config.ratio_clamp
        log_ratio = log_ratios(logprobs, self.anchor_logprobs(micro), mask, bound)
        return TokenLoss(log_ratio.square(), mask, kl_metrics(log_ratio, mask))
