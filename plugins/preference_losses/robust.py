"""Robust DPO: an unbiased loss under swapped labels (rDPO, arXiv:2403.00409)."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid

from posttrain.core.contracts import BetaConfig, BetaPairLoss, PairScores, Prepared


class RobustConfig(BetaConfig):
    """Settings of `robust`."""

    label_smoothing: float = Field(
        default=0.1, ge=0, lt=0.5, description="known share of swapped labels (TRL: 0)"
    )


class RobustLoss(BetaPairLoss[RobustConfig]):
    """l = (-(1 - e) logsigmoid(beta z) + e logsigmoid(-beta z)) / (1 - 2 e) [B], z = u - v.

    Its expectation over labels swapped with probability e is DPO's loss under the right labels;
    ln 2 at the reference. It may be negative. With e = 0 it is DPO.
    Source: arXiv:2403.00409.
    """

    name = "robust"
    Config = RobustConfig

    def pair_loss(self, pairs: PairScores, prepared: Prepared | None = None) -> Tensor:
        """Loss [B] of each pair."""
        smoothing = self.config.label_smoothing
        logits = self.config.beta * (pairs.chosen - pairs.rejected)
        right, wrong = -logsigmoid(logits), -logsigmoid(-logits)
        return ((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing)
