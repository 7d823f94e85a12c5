"""An advantage: the reward less the mean of its group."""

from __future__ import annotations

from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import GroupAdvantage, GroupConfig


class Example(GroupAdvantage[GroupConfig]):
    """A_i = R_i - mean_G(R), the same on each token [B, T]. Source: Dr. GRPO, arXiv:2503.20783.

    The base class broadcasts to tokens, masks, and gives groups of one and of equal rewards 0.
    """

    name = "example"
    Config = GroupConfig

    def group_advantages(self, rewards: Tensor, rows: Tensor, batch: RolloutBatch) -> Tensor:
        """Advantages [G] of a group with rewards [G]; `rows` [G] are its rows in `batch`."""
        return rewards - rewards.mean()
