"""GiGPO: episodes are compared, and turns that were taken in the same state (arXiv:2505.10978)."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import TurnAdvantage, TurnConfig
from posttrain.core.math import turns


class GigpoConfig(TurnConfig):
    """Settings of the `gigpo` advantage."""

    gamma: float = Field(default=0.95, ge=0, le=1, description="discount per turn")
    turn_rewards: Literal["given", "outcome"] = Field(
        default="given",
        description="what is discounted: the environment's reward of each turn (an episode with "
        "none has its outcome reward after its last turn), or the outcome reward alone",
    )


class GigpoAdvantage(TurnAdvantage[GigpoConfig]):
    """A_is = z_g(R_i) + w * z_k(G_is), G_is = sum over turns j >= s of gamma^(j-s) * r_ij.

    R_i is the sum of `token_rewards` [B, T], compared in the group; r_ij is `turn_reward` [B, S]. A
    step group k holds the turns of the group that began with one `state_key` [B, S], also within an
    episode: A^S sums to 0 over it, and is 0 where it has one turn. Without a state that comes twice
    this is `grpo`. w is `turn_weight`, z a deviation from the mean in standard deviations.
    Source: arXiv:2505.10978; its code takes episode statistics over turns, this over episodes.
    """

    name = "gigpo"
    Config = GigpoConfig
    needs = TurnAdvantage.needs | {"state_key"}

    def turn_scores(self, batch: RolloutBatch, valid: Tensor) -> tuple[Tensor, list[int]]:
        """A^S [B, S]: returns from each turn on, compared in its step group."""
        states = batch.column("state_key")
        group = batch.group_id[:, None].expand_as(states)
        ends, gamma = batch.column("turn_end"), self.config.gamma
        returns = turns.turn_returns(self._rewards(batch), ends, gamma)
        keys, tolerance = (group, states), self.config.zero_tol
        return turns.over_groups(returns, keys, valid, self.scores, tolerance)

    def _rewards(self, batch: RolloutBatch) -> Tensor:
        """r [B, S] in float64, NaN where there is none."""
        ends, given = batch.column("turn_end"), batch.column("turn_reward").double()
        order = torch.arange(ends.shape[1])
        is_last = (order == (ends >= 0).sum(dim=1, keepdim=True) - 1) & (ends >= 0)
        outcome = torch.where(is_last, self.row_rewards(batch)[:, None], torch.nan)
        if self.config.turn_rewards == "outcome":
            return outcome
        none = ~(given.isfinite() & (ends >= 0)).any(dim=1, keepdim=True)
        return torch.where(none, outcome, given)
