"""GRPO's group-relative advantage with outcome rewards (arXiv:2402.03300, section 4.1.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import AdvantageEstimator, Advantages, PluginConfig
from posttrain.core.hooks import hookimpl
from posttrain.core.math import groups
from posttrain.core.math.masking import masked


class GrpoConfig(PluginConfig):
    """Settings of the `grpo` advantage."""

    norm_by_std: bool = Field(default=True, description="divide by a standard deviation")
    std_scope: Literal["group", "batch", "none"] = Field(
        default="group", description="rows the deviation is taken over; none = norm_by_std: false"
    )
    ddof: Literal[0, 1] = Field(default=1, description="1 = unbiased (n - 1), 0 = population")
    eps: float = Field(default=1e-6, ge=0, description="added to the deviation (TRL: 1e-4)")
    leave_one_out: bool = Field(
        default=False, description="mean and group deviation of the other rows only (NeMo-RL)"
    )
    singleton: Literal["zero", "raw"] = Field(
        default="zero", description="a group of one: no signal, or mean 0 and deviation 1 (verl)"
    )
    zero_tol: float = Field(
        default=1e-6, ge=0, description="max - min below this * max(1, max abs) is all-equal"
    )


@dataclass(frozen=True, slots=True)
class GroupScores:
    """Advantages [B] in float64 and how many groups there were, had no signal, had one row."""

    advantages: Tensor
    num_groups: int
    num_zero: int
    num_singletons: int


def group_advantages(
    rewards: Tensor, group_ids: Tensor, scored: Tensor, config: GrpoConfig
) -> GroupScores:
    """Rewards [B] (float64) to advantages [B]; rows of a group that is all equal get exactly 0.

    Unscored rows get 0 and enter no statistic.
    """
    by_std = config.norm_by_std and config.std_scope != "none"
    over_batch = by_std and config.std_scope == "batch"
    batch_std = groups.sample_std(rewards[scored.bool()], config.ddof) if over_batch else None
    result = torch.zeros_like(rewards)
    num_groups = num_zero = num_singletons = 0
    for rows in groups.scored_groups(group_ids, scored):
        values = rewards[rows]
        num_groups += 1
        if rows.numel() == 1:
            num_singletons += 1
            if config.singleton == "raw":
                result[rows] = values / (1 + config.eps) if by_std else values
        elif not groups.all_equal(values, config.zero_tol):
            result[rows] = _scores_of_group(values, by_std, batch_std, config)
        num_zero += int(not result[rows].any())
    return GroupScores(result, num_groups, num_zero, num_singletons)


def _scores_of_group(
    values: Tensor, by_std: bool, batch_std: float | None, config: GrpoConfig
) -> Tensor:
    """Scores [G] of a group with at least two rows that differ."""
    if not config.leave_one_out:
        std = groups.sample_std(values, config.ddof) if batch_std is None else batch_std
        centred = values - values.mean()
        return centred / (std + config.eps) if by_std else centred
    scores = []
    for value, others in zip(values, groups.leave_one_out(values), strict=True):
        centred = value - others.mean()
        std = groups.sample_std(others, config.ddof) if batch_std is None else batch_std
        # The others may be all equal although the group is not: then there is nothing to divide by.
        usable = by_std and not (batch_std is None and groups.all_equal(others, config.zero_tol))
        scores.append(centred / (std + config.eps) if usable else centred)
    return torch.stack(scores)


class GrpoAdvantage(AdvantageEstimator[GrpoConfig]):
    """A_i = (R_i - mean_g) / (std_g + eps), the same on every token of response i.

    R_i is the sum of `token_rewards` [B, T] over the response; mean and deviation (n - 1) run over
    the scored rows of the group in float64. Advantages of a group sum to 0 and do not change when
    its rewards are shifted, or scaled (up to eps). An all-equal group is exactly 0.
    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.2.
    """

    name = "grpo"
    Config = GrpoConfig

    def estimate(self, batch: RolloutBatch) -> Advantages:
        """Advantages [B, T], 0 outside `mask`, and shares of groups without signal."""
        rewards = groups.outcome_rewards(batch)
        scores = group_advantages(rewards, batch.group_id, batch.column("scored"), self.config)
        dtype = batch.column("token_rewards").dtype
        per_token = scores.advantages.to(dtype)[:, None].expand(batch.response_mask.shape)
        metrics = {
            "group/zero_adv_frac": scores.num_zero / max(1, scores.num_groups),
            "adv/singleton_groups": float(scores.num_singletons),
        }
        return Advantages(masked(per_token, batch.mask), metrics=metrics)


@hookimpl
def posttrain_register() -> list[type[GrpoAdvantage]]:
    """Offer this plugin."""
    return [GrpoAdvantage]
