"""DiscoPOP: a loss found by search, logistic and exponential mixed (arXiv:2406.08414)."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid

from posttrain.core.contracts import BetaConfig, BetaPairLoss, PairScores, Prepared
from posttrain.core.math.preference import capped_exp


class DiscopopConfig(BetaConfig):
    """Settings of `discopop`."""

    tau: float = Field(
        default=0.05, gt=0, description="width of the switch between the two losses (paper: 0.05)"
    )


class DiscopopLoss(BetaPairLoss[DiscopopConfig]):
    """l = -(1 - m) logsigmoid(beta z) + m exp(-beta z) [B], m = sigmoid(beta z / tau), z = u - v.

    (ln 2 + 1) / 2 at the reference. Far to the left it is DPO's loss, far to the right exp(-beta
    z); between the two it is not convex and, near 0, rises.
    Source: the log-ratio modulated loss of arXiv:2406.08414.
    """

    name = "discopop"
    Config = DiscopopConfig

    def pair_loss(self, pairs: PairScores, prepared: Prepared | None = None) -> Tensor:
        """Loss [B] of each pair."""
        logits = self.config.beta * (pairs.chosen - pairs.rejected)
        modulation = torch.sigmoid(logits / self.config.tau)
        return -(1 - modulation) * logsigmoid(logits) + modulation * capped_exp(-logits)
