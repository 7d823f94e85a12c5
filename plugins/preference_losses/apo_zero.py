"""APO-zero: raise the chosen answer, lower the rejected one (arXiv:2408.06266)."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.core.contracts import BetaConfig, BetaPairLoss, PairScores, Prepared


class ApoZeroLoss(BetaPairLoss[BetaConfig]):
    """l = 1 - sigmoid(beta u) + sigmoid(beta v) [B].

    1 at the reference. For answers better than the policy's own: the chosen one's probability is
    pushed up, the rejected one's down, each by itself.
    Source: arXiv:2408.06266.
    """

    name = "apo_zero"
    Config = BetaConfig

    def pair_loss(self, pairs: PairScores, prepared: Prepared | None = None) -> Tensor:
        """Loss [B] of each pair."""
        chosen, rejected = self.config.beta * pairs.chosen, self.config.beta * pairs.rejected
        return torch.sigmoid(-chosen) + torch.sigmoid(rejected)
