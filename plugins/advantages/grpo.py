"""GRPO's group-relative advantage with outcome rewards (arXiv:2402.03300, section 4.1.2)."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import GroupAdvantage, GroupConfig
from posttrain.core.math import groups


class GrpoConfig(GroupConfig):
    """Settings of the `grpo` advantage."""

    norm_by_std: bool = Field(default=True, description="divide by a standard deviation")
    std_scope: Literal["group", "batch", "none"] = Field(
        default="group", description="rows the deviation is taken over; none = norm_by_std: false"
    )
    ddof: Literal[0, 1] = Field(default=1, description="1 = unbiased (n - 1), 0 = population")
    eps: float = Field(default=1e-6, ge=0, le=1, description="added to the deviation (TRL: 1e-4)")
    leave_one_out: bool = Field(
        default=False, description="mean and group deviation of the other rows only (NeMo-RL)"
    )


class GrpoAdvantage(GroupAdvantage[GrpoConfig]):
    """A_i = (R_i - mean_g) / (std_g + eps), the same on every token of response i.

    R_i is the sum of `token_rewards` [B, T] over the response; mean and deviation (n - 1) run over
    the scored rows of the group in float64. Advantages of a group sum to 0 and do not change when
    its rewards are shifted, or scaled (up to eps). An all-equal group is exactly 0.
    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.2.
    """

    name = "grpo"
    Config = GrpoConfig

    def deviates_over(self) -> Literal["group", "batch", "none"]:
        """The rows whose standard deviation divides."""
        return self.config.std_scope if self.config.norm_by_std else "none"

    def divisor(self, rewards: Tensor) -> float:
        """The deviation of the whole batch, with `std_scope: batch`."""
        if self.deviates_over() != "batch":
            return 1.0
        return groups.sample_std(rewards, self.config.ddof) + self.config.eps

    def alone(self, rewards: Tensor) -> Tensor:
        """Mean 0 and deviation 1 stand for what a group of one does not have."""
        return rewards if self.deviates_over() == "none" else rewards / (1 + self.config.eps)

    def group_advantages(self, rewards: Tensor, rows: Tensor, batch: RolloutBatch) -> Tensor:
        """Deviations from the group's mean, or from that of the others, in deviations."""
        config, by_group = self.config, self.deviates_over() == "group"
        if not config.leave_one_out:
            if by_group:
                return groups.z_scores(rewards, config.ddof, config.eps)
            return rewards - rewards.mean()
        scores = []
        for value, others in zip(rewards, groups.leave_one_out(rewards), strict=True):
            # The others may be all equal although the group is not: nothing to divide by then.
            usable = by_group and not groups.all_equal(others, config.zero_tol)
            std = groups.sample_std(others, config.ddof) + config.eps if usable else 1.0
            scores.append((value - others.mean()) / std)
        return torch.stack(scores)
