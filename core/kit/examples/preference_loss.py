"""A preference loss: the hinge on the gap of log-ratios."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import relu

from posttrain.core.contracts import BetaConfig, BetaPairLoss, PairScores, Prepared


class Example(BetaPairLoss[BetaConfig]):
    """l = max(0, 1 - beta (u - v)) [B], u and v the scores of the chosen and the rejected answer.

    Source: RSO, arXiv:2309.06657, after SLiC-HF, arXiv:2305.10425.
    """

    name = "example"
    Config = BetaConfig

    def pair_loss(self, pairs: PairScores, prepared: Prepared | None = None) -> Tensor:
        """Loss [B] of each pair; the trainer takes the mean over the mini-batch."""
        return relu(1 - self.config.beta * (pairs.chosen - pairs.rejected))
