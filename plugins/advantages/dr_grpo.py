"""Dr. GRPO's advantage: centred in the group, not divided (arXiv:2503.20783, section 3.2)."""

from __future__ import annotations

from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import GroupAdvantage, GroupConfig


class DrGrpoAdvantage(GroupAdvantage[GroupConfig]):
    """A_i = R_i - mean_g, the same on every token of response i.

    R_i is the sum of `token_rewards` [B, T]. It is the paper's algorithm only together with the
    aggregator `seq-mean-token-sum-norm`; with another one it is GRPO without its deviation.
    Source: Liu et al., arXiv:2503.20783, section 3.2.
    """

    name = "dr_grpo"
    Config = GroupConfig

    def group_advantages(self, rewards: Tensor, rows: Tensor, batch: RolloutBatch) -> Tensor:
        """Deviations [G] from the group's mean."""
        return rewards - rewards.mean()
