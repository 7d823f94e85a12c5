"""REINFORCE++ with a group baseline, whitened over the batch (arXiv:2501.03262)."""

from __future__ import annotations

from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import GroupAdvantage, GroupConfig, WhitenedConfig


class ReinforcePpBaselineConfig(WhitenedConfig, GroupConfig):
    """Settings of the `reinforce_pp_baseline` advantage."""


class ReinforcePpBaselineAdvantage(GroupAdvantage[ReinforcePpBaselineConfig]):
    """A_i = whiten(R_i - mean_g), R_i - mean_g standing on every token of response i.

    Whitened over all tokens that take loss: mean 0 and variance 1 there. The paper adds the KL as a
    loss (`k2`), not to the reward. OpenRLHF whitens with `whiten_ddof: 0`.
    Source: Hu et al., arXiv:2501.03262.
    """

    name = "reinforce_pp_baseline"
    Config = ReinforcePpBaselineConfig

    def group_advantages(self, rewards: Tensor, rows: Tensor, batch: RolloutBatch) -> Tensor:
        """Deviations [G] from the group's mean."""
        return rewards - rewards.mean()
