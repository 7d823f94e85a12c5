"""BCO on pairs: a binary classifier of answers (arXiv:2404.04656)."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from posttrain.core.contracts import BetaConfig, BetaPairLoss, PairScores, Prepared


class BcoPairLoss(BetaPairLoss[BetaConfig]):
    """l = -logsigmoid(beta u) - logsigmoid(-beta v) [B].

    2 ln 2 at the reference. Each answer is classified on its own, so a gain of u is never paid for
    by v. Without the paper's running mean of rewards (TRL's DPO trainer has none either).
    Source: arXiv:2404.04656.
    """

    name = "bco_pair"
    Config = BetaConfig

    def pair_loss(self, pairs: PairScores, prepared: Prepared | None = None) -> Tensor:
        """Loss [B] of each pair."""
        chosen, rejected = self.config.beta * pairs.chosen, self.config.beta * pairs.rejected
        return -logsigmoid(chosen) - logsigmoid(-rejected)
