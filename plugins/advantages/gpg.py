"""GPG: group baseline, and a factor that undoes degenerate groups (arXiv:2504.02546)."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import GroupAdvantage, GroupConfig
from posttrain.core.math import groups


class GpgConfig(GroupConfig):
    """Settings of the `gpg` advantage."""

    f_norm: float = Field(default=1.0, gt=0, description="F_norm, divides every advantage")
    norm_by_std: bool = Field(
        default=False,
        description="F_norm is the group's deviation instead; the paper found it worse with alpha",
    )
    ddof: Literal[0, 1] = Field(default=1, description="1 = unbiased (n - 1), 0 = population")
    eps: float = Field(default=1e-6, ge=0, le=1, description="added to the deviation")
    verl_compat: bool = Field(
        default=False,
        description="M counts rewards other than 0, and a group of one keeps its reward (verl)",
    )


class GpgAdvantage(GroupAdvantage[GpgConfig]):
    """A_i = alpha * (R_i - mean_g) / F_norm, alpha = B / M, the same on every token.

    B is the number of scored responses of the rollout batch, M of those whose group is not
    degenerate (all equal, or alone), so that rows without gradient do not dilute the rest; all 0 if
    M is 0. With the `dynamic` sampler M = B and alpha does nothing.
    Source: Chu et al., arXiv:2504.02546.
    """

    name = "gpg"
    Config = GpgConfig

    def keeps_singletons(self) -> bool:
        """With `verl_compat` as well."""
        return self.config.verl_compat or super().keeps_singletons()

    def group_advantages(self, rewards: Tensor, rows: Tensor, batch: RolloutBatch) -> Tensor:
        """Deviations [G] from the group's mean, over F_norm."""
        if self.config.norm_by_std:
            return groups.z_scores(rewards, self.config.ddof, self.config.eps)
        return (rewards - rewards.mean()) / self.config.f_norm

    def alone(self, rewards: Tensor) -> Tensor:
        """Mean 0 and deviation 1 stand for what a group of one does not have."""
        config = self.config
        return rewards / ((1 + config.eps) if config.norm_by_std else config.f_norm)

    def compare(self, rewards: Tensor, compared: Tensor, batch: RolloutBatch) -> Tensor:
        """As in any group, times alpha."""
        result = super().compare(rewards, compared, batch)
        num_rows = int(compared.sum())
        if self.config.verl_compat:
            num_informative = max(1, int((rewards[compared] != 0).sum()))
        else:
            members = groups.scored_groups(batch.group_id, compared)
            num_informative = sum(rows.numel() for rows in members if result[rows].any())
        if num_informative == 0:
            return torch.zeros_like(result)
        return result * (num_rows / num_informative)
