"""SPPO with hard labels: squared distance to +-1 / (2 beta) (arXiv:2405.00675)."""

from __future__ import annotations

from torch import Tensor

from posttrain.core.contracts import BetaConfig, BetaPairLoss, PairScores, Prepared


class SppoHardLoss(BetaPairLoss[BetaConfig]):
    """l = (u - 1 / (2 beta))^2 + (v + 1 / (2 beta))^2 [B].

    1 / (2 beta^2) at the reference; 0 exactly where u = 1 / (2 beta) = -v, so each answer has a
    target of its own. The chosen answer is taken to win with probability 1.
    Source: arXiv:2405.00675 with win probabilities 1 and 0 (its eta is 1 / beta).
    """

    name = "sppo_hard"
    Config = BetaConfig

    def pair_loss(self, pairs: PairScores, prepared: Prepared | None = None) -> Tensor:
        """Loss [B] of each pair."""
        target = 1 / (2 * self.config.beta)
        return (pairs.chosen - target).square() + (pairs.rejected + target).square()
