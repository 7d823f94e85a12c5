"""KTO: single answers with a label, against a reference point (arXiv:2402.01306, eq. 8)."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from posttrain.core.contracts import BetaConfig, LabelledScores, LabelLoss, Prepared
from posttrain.core.errors import RunError


class KtoConfig(BetaConfig):
    """Settings of `kto`."""

    desirable_weight: float = Field(
        default=1.0,
        ge=0,
        description="factor of desirable rows; keep (weight x rows) of the two labels between 1:1 "
        "and 4:3",
    )
    undesirable_weight: float = Field(
        default=1.0, ge=0, description="factor of undesirable rows (TRL: 1)"
    )


class KtoLoss(LabelLoss[KtoConfig]):
    """Desirable: w_D (1 - sigmoid(beta (u - z_ref))); undesirable: w_U (1 - sigmoid(beta (z_ref -
    u))), [B].

    z_ref = max(0, mean of u' over the mini-batch), detached, u' the log-ratio of an answer to
    another prompt: an estimate of the KL from the reference. Both losses are 1/2 at u = z_ref; the
    gradient in u is largest there and has the sign of the label.
    Source: arXiv:2402.01306 eq. 8 and section 4.1.
    """

    name = "kto"
    Config = KtoConfig
    needs_kl_completions = True

    def reward_scale(self) -> float | None:
        """beta."""
        return self.config.beta

    def prepare(self, mini: LabelledScores) -> Prepared:
        """The reference point."""
        if mini.kl_scores is None:
            raise RunError("kto needs the scores of mismatched answers for its reference point")
        z_ref = max(0.0, float(mini.kl_scores.detach().double().mean()))
        return Prepared(scalars={"z_ref": z_ref}, metrics={"kto/z_ref": z_ref})

    def label_loss(self, rows: LabelledScores, prepared: Prepared | None = None) -> Tensor:
        """Loss [B] of each row."""
        config = self.config
        z_ref = (prepared or self.prepare(rows)).scalars["z_ref"]
        gain = config.beta * (rows.scores - z_ref)
        return torch.where(
            rows.desirable,
            config.desirable_weight * torch.sigmoid(-gain),  # 1 - sigmoid(x) = sigmoid(-x)
            config.undesirable_weight * torch.sigmoid(gain),
        )
