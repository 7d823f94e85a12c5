"""CPO: DPO without a reference, plus supervised learning (arXiv:2401.08417)."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from posttrain.core.contracts import AlphaPoConfig, BetaConfig, BetaPairLoss, PairScores, Prepared
from posttrain.core.math.preference import alpha_shape, smoothed_logistic


class CpoConfig(AlphaPoConfig, BetaConfig):
    """Settings of `cpo`."""

    cpo_alpha: float = Field(
        default=1.0, ge=0, description="factor of the chosen answers' token-mean NLL (TRL: 1)"
    )
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=0.5, description="assumed share of swapped labels (TRL: 0)"
    )


class CpoLoss(BetaPairLoss[CpoConfig]):
    """l = -(1 - e) F(beta z) - e F(-beta z) + cpo_alpha * NLL(chosen) [B], z = S(c) - S(j).

    F = logsigmoid. S are the policy's own log-probs: no reference model is loaded, and a common
    shift of both leaves the first part alone. With `alpha_po` a: S becomes (1 - exp(-a S / |y|)) /
    a.
    Sources: arXiv:2401.08417; AlphaPO, arXiv:2501.03884.
    """

    name = "cpo"
    Config = CpoConfig
    needs_reference = False
    reads_scores = False

    def pair_loss(self, pairs: PairScores, prepared: Prepared | None = None) -> Tensor:
        """Loss [B] of each pair."""
        config = self.config
        chosen, rejected = pairs.logps()
        if config.alpha_po != 0:
            means = pairs.per_token(chosen, rejected)
            chosen, rejected = (alpha_shape(mean, config.alpha_po) for mean in means)
        loss = smoothed_logistic(config.beta * (chosen - rejected), config.label_smoothing)
        return loss + config.cpo_alpha * pairs.token_mean_nll() if config.cpo_alpha > 0 else loss
