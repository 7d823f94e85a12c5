"""REINFORCE leave-one-out: the other responses are the baseline (arXiv:2402.14740)."""

from __future__ import annotations

from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import GroupAdvantage, GroupConfig


class RlooAdvantage(GroupAdvantage[GroupConfig]):
    """A_i = R_i - mean of the other R_j = G / (G - 1) * (R_i - mean_g), on every token.

    G is the number of scored responses of the group. R_i is the sum of `token_rewards` [B, T]: in
    the paper it holds the KL penalty (`kl.place: reward`). TRL whitens by `sequences`, off by
    default, and keeps 0 for a group of one; verl keeps its reward (`singleton: raw`).
    Source: Ahmadian et al., arXiv:2402.14740 (Kool et al. 2019).
    """

    name = "rloo"
    Config = GroupConfig

    def group_advantages(self, rewards: Tensor, rows: Tensor, batch: RolloutBatch) -> Tensor:
        """Deviations [G] from the mean of the others."""
        size = rewards.numel()
        return (rewards - rewards.mean()) * (size / (size - 1))
