"""EXO on pairs: the reverse KL between two distributions over the pair (arXiv:2402.00856)."""

from __future__ import annotations

import math

from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid

from posttrain.core.contracts import BetaConfig, BetaPairLoss, PairScores, Prepared


class ExoPairConfig(BetaConfig):
    """Settings of `exo_pair`."""

    label_smoothing: float = Field(
        default=1e-3, gt=0, lt=0.5, description="probability of the rejected answer (TRL: 1e-3)"
    )


class ExoPairLoss(BetaPairLoss[ExoPairConfig]):
    """l = q_c (ln q_c - ln(1 - e)) + q_j (ln q_j - ln e) [B], q_c = sigmoid(beta (u - v)).

    KL(q || (1 - e, e)): 0 exactly where beta (u - v) = ln((1 - e) / e), positive elsewhere.
    Source: arXiv:2402.00856, eq. 16.
    """

    name = "exo_pair"
    Config = ExoPairConfig

    def pair_loss(self, pairs: PairScores, prepared: Prepared | None = None) -> Tensor:
        """Loss [B] of each pair."""
        smoothing = self.config.label_smoothing
        logits = self.config.beta * (pairs.chosen - pairs.rejected)
        log_chosen, log_rejected = logsigmoid(logits), logsigmoid(-logits)
        return log_chosen.exp() * (log_chosen - math.log1p(-smoothing)) + log_rejected.exp() * (
            log_rejected - math.log(smoothing)
        )
