"""AOT on pairs: sorted gaps against the reference's sorted gaps (arXiv:2406.05882)."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from posttrain.core.contracts import BetaConfig, BetaPairLoss, PairScores, Prepared
from posttrain.core.math.preference import matched_by_rank, smoothed_logistic


class AotConfig(BetaConfig):
    """Settings of `aot` and `aot_unpaired`."""

    label_smoothing: float = Field(
        default=0.0, ge=0, lt=0.5, description="share of wrong labels (TRL: 0)"
    )


class AotLoss(BetaPairLoss[AotConfig]):
    """D = sort(S(c) - S(j)) - sort(S_ref(c) - S_ref(j)); -(1 - e) F(beta D) - e F(-beta D), [B].

    F = logsigmoid; ranks are taken over the whole mini-batch. A pair's gap is compared with the
    reference's gap of the same *rank*, which makes the policy's distribution of gaps dominate the
    reference's. With one pair, and when both have the same order, it is DPO; ln 2 at the reference.
    Source: arXiv:2406.05882 (paired).
    """

    name = "aot"
    Config = AotConfig
    reads_scores = False
    needs_prepare = True

    def prepare(self, mini: PairScores) -> Prepared:
        """For each pair the reference's gap of its rank."""
        chosen, rejected = mini.logps()
        ref_chosen, ref_rejected = mini.ref_logps()
        gaps, ref_gaps = (chosen - rejected).detach(), (ref_chosen - ref_rejected).detach()
        return Prepared(columns={"ref_gap": matched_by_rank(gaps, ref_gaps)})

    def pair_loss(self, pairs: PairScores, prepared: Prepared | None = None) -> Tensor:
        """Loss [B] of each pair."""
        ref_gap = (prepared or self.prepare(pairs)).columns["ref_gap"]
        chosen, rejected = pairs.logps()
        logits = self.config.beta * (chosen - rejected - ref_gap)
        return smoothed_logistic(logits, self.config.label_smoothing)
