"""Bradley-Terry loss of a reward model on pairs (arXiv:2203.02155, eq. 1)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor
from torch.nn.functional import softplus

from posttrain.core.contracts import PairLoss, PairScores, PluginConfig, Prepared


class BradleyTerryConfig(PluginConfig):
    """Settings of `bradley_terry`."""

    margin: float = Field(
        default=0.0, ge=0, description="added to each pair's own margin (Llama 2), in score units"
    )
    centre_coef: float = Field(
        default=0.0, ge=0, description="pulls chosen + rejected to 0 (arXiv:2312.09244: 0.01)"
    )


class BradleyTerryLoss(PairLoss[BradleyTerryConfig]):
    """l = -logsigmoid(chosen - rejected - margin) + centre_coef * (chosen + rejected)^2, all [B].

    Equal scores without a margin cost ln 2. The gradient in `chosen` is -(1 - sigmoid(chosen -
    rejected - margin)) and in `rejected` its negative, as long as `centre_coef` is 0.
    Sources: InstructGPT arXiv:2203.02155 eq. 1; margin: Llama 2 arXiv:2307.09288 eq. 2.
    """

    name = "bradley_terry"
    Config = BradleyTerryConfig
    trains: ClassVar[frozenset[str]] = frozenset({"reward_model"})
    needs_reference = False

    def pair_loss(self, pairs: PairScores, prepared: Prepared | None = None) -> Tensor:
        """Loss [B] of each pair of rewards."""
        # softplus(-x) is -logsigmoid(x).
        gap = pairs.chosen - pairs.rejected - pairs.margin - self.config.margin
        loss = softplus(-gap)
        if self.config.centre_coef == 0:
            return loss
        return loss + self.config.centre_coef * (pairs.chosen + pairs.rejected).square()
