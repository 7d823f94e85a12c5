"""OPO: the group's baseline weighs long responses more (arXiv:2505.23585)."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import GroupAdvantage, GroupConfig


class OpoAdvantage(GroupAdvantage[GroupConfig]):
    """A_i = R_i - b_g, b_g = sum_i |y_i| R_i / sum_i |y_i|, the same on every token.

    |y_i| counts the sampled tokens of response i. The baseline has the least variance if the
    squared norm of a response's gradient grows with its length; it is meant for exactly on-policy
    updates without KL or entropy terms. If all lengths are 0, b_g is the mean.
    Source: Hao et al., arXiv:2505.23585.
    """

    name = "opo"
    Config = GroupConfig

    def group_advantages(self, rewards: Tensor, rows: Tensor, batch: RolloutBatch) -> Tensor:
        """Deviations [G] from the mean weighted by length."""
        lengths, firsts = batch.response_mask.double().sum(dim=1), batch.first_branches()
        if firsts is not None:  # the tokens of all branches of an episode
            lengths = torch.zeros_like(lengths).index_add(0, firsts, lengths)
        lengths = lengths[rows]
        total = lengths.sum()
        return rewards - ((lengths * rewards).sum() / total if total > 0 else rewards.mean())
