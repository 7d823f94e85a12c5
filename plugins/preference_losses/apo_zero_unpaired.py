"""APO-zero on single answers with a label (arXiv:2408.06266; TRL's unpaired form)."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from posttrain.core.contracts import BetaConfig, LabelledScores, LabelLoss, Prepared


class ApoZeroUnpairedConfig(BetaConfig):
    """Settings of `apo_zero_unpaired`."""

    desirable_weight: float = Field(default=1.0, ge=0, description="factor of desirable rows")
    undesirable_weight: float = Field(default=1.0, ge=0, description="factor of undesirable rows")


class ApoZeroUnpairedLoss(LabelLoss[ApoZeroUnpairedConfig]):
    """Desirable: w_D (1 - sigmoid(beta u)); undesirable: w_U sigmoid(beta u), [B].

    KTO with a reference point of 0, so no mismatched answers are scored. 1/2 at the reference.
    Source: arXiv:2408.06266 (`apo_zero` term by term), as TRL's KTO trainer offers it.
    """

    name = "apo_zero_unpaired"
    Config = ApoZeroUnpairedConfig

    def reward_scale(self) -> float | None:
        """beta."""
        return self.config.beta

    def label_loss(self, rows: LabelledScores, prepared: Prepared | None = None) -> Tensor:
        """Loss [B] of each row."""
        config = self.config
        gain = config.beta * rows.scores
        return torch.where(
            rows.desirable,
            config.desirable_weight * torch.sigmoid(-gain),
            config.undesirable_weight * torch.sigmoid(gain),
        )
