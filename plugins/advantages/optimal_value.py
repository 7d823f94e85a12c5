"""Rewards less the value of the best policy within a KL, from the group's rewards (A*-PO)."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import GroupAdvantage, GroupConfig
from posttrain.core.math.groups import optimal_value


class OptimalValueConfig(GroupConfig):
    """Settings of the `optimal_value` advantage."""

    beta: float = Field(
        default=0.5, gt=0, le=1_000, description="temperature of the value (beta_1; TRL: 0.5)"
    )


class OptimalValueAdvantage(GroupAdvantage[OptimalValueConfig]):
    """A_i = R_i - V*, V* = beta ln(mean_g exp(R / beta)), the same on every token.

    V* lies between the mean (beta -> inf) and the maximum (beta -> 0) of the group's rewards: the
    value of the best policy under a KL penalty of beta to the one that sampled them. No deviation
    divides. An all-equal group is exactly 0.
    Source: A*-PO, arXiv:2505.20686, stage 1.
    """

    name = "optimal_value"
    Config = OptimalValueConfig

    def group_advantages(self, rewards: Tensor, rows: Tensor, batch: RolloutBatch) -> Tensor:
        """Rewards [G] less V*."""
        return rewards - optimal_value(rewards, self.config.beta)
