"""APO-down: lower both answers, the rejected one more (arXiv:2408.06266)."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.core.contracts import BetaConfig, BetaPairLoss, PairScores, Prepared


class ApoDownLoss(BetaPairLoss[BetaConfig]):
    """l = sigmoid(beta u) + 1 - sigmoid(beta (u - v)) [B].

    1 at the reference, where the gradient in u is 0 and in v beta / 4. For answers worse than the
    policy's own: the chosen one's probability is pushed down too, the gap is widened all the same.
    Source: arXiv:2408.06266.
    """

    name = "apo_down"
    Config = BetaConfig

    def pair_loss(self, pairs: PairScores, prepared: Prepared | None = None) -> Tensor:
        """Loss [B] of each pair."""
        chosen, rejected = self.config.beta * pairs.chosen, self.config.beta * pairs.rejected
        return torch.sigmoid(chosen) + torch.sigmoid(rejected - chosen)
