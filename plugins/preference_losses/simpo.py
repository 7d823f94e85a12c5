"""SimPO: length-averaged log-probs, a target margin, no reference (arXiv:2405.14734)."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from posttrain.core.contracts import AlphaPoConfig, BetaConfig, BetaPairLoss, PairScores, Prepared
from posttrain.core.math.preference import alpha_shape, smoothed_logistic


class SimpoConfig(AlphaPoConfig, BetaConfig):
    """Settings of `simpo`."""

    beta: float = Field(
        default=2.0,
        gt=0,
        le=1_000,
        description="factor of the mean log-prob per token (paper: 2 to 2.5)",
    )
    gamma: float = Field(
        default=0.5, ge=0, description="reward margin to reach (TRL: 0.5; paper: 0.3 to 1.6)"
    )
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=0.5, description="assumed share of swapped labels (TRL: 0)"
    )


class SimpoLoss(BetaPairLoss[SimpoConfig]):
    """l = -(1 - e) F(x) - e F(-x) [B], x = beta (r_c - r_j) - gamma, r = S(y) / |y|.

    F = logsigmoid. With `alpha_po` a: r = (1 - exp(-a S / |y|)) / a, which is S / |y| as a -> 0. No
    reference model is loaded. The loss is ln 2 where the gap of rewards beta r is exactly gamma.
    Sources: SimPO arXiv:2405.14734 eq. 6; AlphaPO arXiv:2501.03884.
    """

    name = "simpo"
    Config = SimpoConfig
    needs_reference = False
    reads_scores = False
    per_token_reward = True

    def pair_loss(self, pairs: PairScores, prepared: Prepared | None = None) -> Tensor:
        """Loss [B] of each pair."""
        config = self.config
        chosen, rejected = (
            alpha_shape(mean, config.alpha_po) for mean in pairs.per_token(*pairs.logps())
        )
        logits = config.beta * (chosen - rejected) - config.gamma
        return smoothed_logistic(logits, config.label_smoothing)
