"""Turn-level GRPO: turns are compared with those at the same place of other episodes."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import TurnAdvantage, TurnConfig
from posttrain.core.math import turns


class TurnGrpoConfig(TurnConfig):
    """Settings of the `turn_grpo` advantage."""

    turn_returns: bool = Field(
        default=False,
        description="compare the discounted sum of the rewards from a turn on, not its own reward",
    )
    gamma: float = Field(default=1.0, ge=0, le=1, description="discount per turn of turn_returns")


class TurnGrpoAdvantage(TurnAdvantage[TurnGrpoConfig]):
    """A_is = z_g(r_is) + lam * z_g(R_i) on the tokens of turn s.

    r_is is `turn_reward` [B, S], 0 where the environment gave none, compared with the other turns s
    of the group: episodes that have no turn s are not among them, and fewer than two get 0. R_i is
    the sum of `token_rewards` [B, T], lam is `outcome_weight`. Late turns have small groups.
    Source: arXiv:2505.11821, eq. 7.
    """

    name = "turn_grpo"
    Config = TurnGrpoConfig

    def turn_scores(self, batch: RolloutBatch, valid: Tensor) -> tuple[Tensor, list[int]]:
        """Rewards, or returns, of each turn compared at its index."""
        ends = batch.column("turn_end")
        gamma = self.config.gamma if self.config.turn_returns else 0.0
        rewards = turns.turn_returns(batch.column("turn_reward"), ends, gamma)
        group = batch.group_id[:, None].expand_as(ends)
        place = torch.arange(ends.shape[1]).expand_as(ends)
        keys, tolerance = (group, place), self.config.zero_tol
        return turns.over_groups(rewards, keys, valid, self.scores, tolerance)
