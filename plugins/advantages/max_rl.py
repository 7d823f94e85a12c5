"""MaxRL: deviations from the group's mean, in units of that mean (arXiv:2602.02710)."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import GroupAdvantage, GroupConfig


class MaxRlConfig(GroupConfig):
    """Settings of the `max_rl` advantage."""

    min_mean: float = Field(
        default=1e-6, gt=0, description="groups with a mean reward up to this get 0 (prime-rl)"
    )


class MaxRlAdvantage(GroupAdvantage[MaxRlConfig]):
    """A_i = (R_i - mean_g) / mean_g, the same on every token; 0 if mean_g <= `min_mean`.

    For rewards of 0 and 1 a rare success counts in proportion to its rarity: of G responses with k
    right ones, each of these gets (G - k) / k and the others -1.
    Source: arXiv:2602.02710.
    """

    name = "max_rl"
    Config = MaxRlConfig

    def group_advantages(self, rewards: Tensor, rows: Tensor, batch: RolloutBatch) -> Tensor:
        """Relative deviations [G] from the mean."""
        mean = rewards.mean()
        if mean <= self.config.min_mean:
            return torch.zeros_like(rewards)
        return (rewards - mean) / mean
