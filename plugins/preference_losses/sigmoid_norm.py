"""Length-normalised DPO (Tulu 3, arXiv:2411.15124)."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from posttrain.core.contracts import BetaConfig, BetaPairLoss, PairScores, Prepared


class SigmoidNormLoss(BetaPairLoss[BetaConfig]):
    """l = -logsigmoid(beta (u / n_c - v / n_j)) [B], n the answers' numbers of tokens.

    ln 2 at the reference. Repeating an answer's every token with the same log-ratio changes
    nothing, so length alone is not rewarded. beta is per token: usual values are larger than DPO's.
    Source: arXiv:2411.15124, section 5 (there with beta 5).
    """

    name = "sigmoid_norm"
    Config = BetaConfig

    def pair_loss(self, pairs: PairScores, prepared: Prepared | None = None) -> Tensor:
        """Loss [B] of each pair."""
        chosen, rejected = pairs.per_token(pairs.chosen, pairs.rejected)
        return -logsigmoid(self.config.beta * (chosen - rejected))
