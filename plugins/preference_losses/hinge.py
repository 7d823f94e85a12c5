"""Hinge loss on the gap of log-ratios (RSO, arXiv:2309.06657; SLiC, arXiv:2305.10425)."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import relu

from posttrain.core.contracts import BetaConfig, BetaPairLoss, PairScores, Prepared


class HingeLoss(BetaPairLoss[BetaConfig]):
    """l = max(0, 1 - beta (u - v)) [B].

    1 at the reference, whatever beta is. The gradient in u is -beta up to a gap of 1 / beta and
    exactly 0 beyond: pairs that are far enough apart are left alone.
    Sources: the normalised hinge loss of RSO, arXiv:2309.06657, after SLiC-HF, arXiv:2305.10425.
    """

    name = "hinge"
    Config = BetaConfig

    def pair_loss(self, pairs: PairScores, prepared: Prepared | None = None) -> Tensor:
        """Loss [B] of each pair."""
        return relu(1 - self.config.beta * (pairs.chosen - pairs.rejected))
