"""ReMax: the greedy answer's reward is the baseline (arXiv:2310.10505)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import AdvantageConfig, Advantages, TokenAdvantage
from posttrain.core.math import groups
from posttrain.core.math.returns import rewards_to_go


class RemaxAdvantage(TokenAdvantage[AdvantageConfig]):
    """A_t = G_t - R(x, greedy y), G_t being the sum of `token_rewards` from token t onwards.

    `baseline_reward` [B] is the reward of the answer at temperature 0 to the same prompt. Where it
    could not be scored (NaN), the mean of the group's own episodes stands in, and
    `adv/greedy_unscored_groups` counts it. Source: Li et al., arXiv:2310.10505, algorithm 1.
    """

    name = "remax"
    Config = AdvantageConfig
    needs: ClassVar[frozenset[str]] = frozenset({"token_rewards", "scored", "baseline_reward"})

    def token_advantages(self, batch: RolloutBatch) -> Advantages:
        """Rewards-to-go of every sampled token, less the baseline."""
        baseline, num_unscored = self._baseline(batch)
        onwards = rewards_to_go(batch.column("token_rewards"), batch.response_mask)
        metrics = {"adv/greedy_unscored_groups": float(num_unscored)}
        return Advantages(onwards - baseline[:, None], metrics=metrics)

    def _baseline(self, batch: RolloutBatch) -> tuple[Tensor, int]:
        """The baseline [B] of each row, and for how many groups the mean stands in."""
        rewards = groups.outcome_rewards(batch)
        baseline = batch.column("baseline_reward").double().clone()
        num_unscored = 0
        leads = batch.leads()
        for rows in groups.scored_groups(batch.group_id, batch.column("scored")):
            missing = ~baseline[rows].isfinite()
            num_unscored += int(missing.any())
            mean = rewards[rows[leads[rows]]].mean()
            baseline[rows] = torch.where(missing, mean, baseline[rows])
        return baseline, num_unscored
