"""NCA on pairs: noise contrast instead of comparison (arXiv:2402.05369)."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from posttrain.core.contracts import BetaConfig, BetaPairLoss, PairScores, Prepared


class NcaPairLoss(BetaPairLoss[BetaConfig]):
    """l = -F(beta u) - F(-beta u) / 2 - F(-beta v) / 2 [B], F = logsigmoid.

    2 ln 2 at the reference. It reads u and v, not their difference: the chosen answer's own
    log-ratio is driven to beta u = ln 2, so it does not fall as it may under DPO.
    Source: arXiv:2402.05369, for two answers.
    """

    name = "nca_pair"
    Config = BetaConfig

    def pair_loss(self, pairs: PairScores, prepared: Prepared | None = None) -> Tensor:
        """Loss [B] of each pair."""
        chosen, rejected = self.config.beta * pairs.chosen, self.config.beta * pairs.rejected
        both = logsigmoid(-chosen) + logsigmoid(-rejected)
        return -logsigmoid(chosen) - 0.5 * both
