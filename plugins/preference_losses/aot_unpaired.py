"""AOT without pairing: sorted chosen scores against sorted rejected scores (arXiv:2406.05882)."""

from __future__ import annotations

from torch import Tensor

from posttrain.core.contracts import BetaPairLoss, PairScores, Prepared
from posttrain.core.math.preference import matched_by_rank, smoothed_logistic
from posttrain.plugins.preference_losses.aot import AotConfig


class AotUnpairedLoss(BetaPairLoss[AotConfig]):
    """D = sort(u) - sort(v); l = -(1 - e) F(beta D) - e F(-beta D), [B], F = logsigmoid.

    Ranks are taken over the whole mini-batch, so shuffling the rejected answers against the chosen
    ones changes nothing. Row i holds the term of u_i's rank; the gradient of v_i, whose term sits
    in another row, comes from a second term of value 0: value and gradients are exact however the
    mini-batch is split. ln 2 at the reference.
    Source: arXiv:2406.05882 (unpaired).
    """

    name = "aot_unpaired"
    Config = AotConfig
    needs_prepare = True

    def prepare(self, mini: PairScores) -> Prepared:
        """For each chosen score the rejected one of its rank, and the other way round."""
        chosen, rejected = mini.chosen.detach(), mini.rejected.detach()
        return Prepared(
            columns={
                "rejected_of_rank": matched_by_rank(chosen, rejected),
                "chosen_of_rank": matched_by_rank(rejected, chosen),
            }
        )

    def pair_loss(self, pairs: PairScores, prepared: Prepared | None = None) -> Tensor:
        """Loss [B]: the term of each chosen score's rank."""
        columns = (prepared or self.prepare(pairs)).columns
        of_rejected = self._term(columns["chosen_of_rank"] - pairs.rejected)
        return (
            self._term(pairs.chosen - columns["rejected_of_rank"])
            + of_rejected
            - of_rejected.detach()
        )

    def _term(self, gap: Tensor) -> Tensor:
        return smoothed_logistic(self.config.beta * gap, self.config.label_smoothing)
