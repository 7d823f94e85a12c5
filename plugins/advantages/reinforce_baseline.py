"""REINFORCE with a scalar baseline: batch mean, group mean, moving average, or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import AdvantageConfig, RowAdvantage
from posttrain.core.math import groups

STATE_PREFIX = "ema/"


class ReinforceBaselineConfig(AdvantageConfig):
    """Settings of the `reinforce_baseline` advantage."""

    baseline: Literal["batch_mean", "group_mean", "ema", "none"] = Field(
        default="batch_mean",
        description="what is subtracted: the mean over the batch, over the responses to the same "
        "prompt, a moving average per agent, or nothing",
    )
    decay: float = Field(
        default=0.95, ge=0, lt=1, description="of the moving average, per rollout batch"
    )
    zero_tol: float = Field(
        default=1e-6,
        ge=0,
        description="max - min below this * max(1, max abs) is all-equal: exactly 0 from a mean",
    )


class ReinforceBaselineAdvantage(RowAdvantage[ReinforceBaselineConfig]):
    """A_i = R_i - b, the same on every token of response i.

    A b that does not depend on response i leaves the expected gradient as it is; a mean over n rows
    includes R_i and scales it by 1 - 1/n. `ema` starts at 0; the whole batch is scored with the old
    value, then b <- decay * b + (1 - decay) * mean(R) for each agent (RAE, arXiv:2506.24119,
    updates after every response, so their order matters there). Its state has one key per agent,
    `ema/<agent_id>`. Source: Williams, Machine Learning 8 (1992).
    """

    name = "reinforce_baseline"
    Config = ReinforceBaselineConfig

    def __init__(self, config: ReinforceBaselineConfig) -> None:
        super().__init__(config)
        self._averages: dict[int, float] = {}

    def required_columns(self) -> frozenset[str]:
        """`agent_id` too when each agent has a moving average."""
        return self.needs | {"agent_id"} if self.config.baseline == "ema" else self.needs

    def smallest_group(self) -> int:
        """The mean of a group of one is its reward."""
        return 2 if self.config.baseline == "group_mean" else 1

    def row_advantages(self, batch: RolloutBatch) -> tuple[Tensor, dict[str, float]]:
        """Rewards [B] less the baseline."""
        rewards, scored = groups.outcome_rewards(batch), batch.column("scored").bool()
        parts, baseline = batch.group_id, self.config.baseline
        if baseline == "ema":
            parts = batch.column("agent_id")
        elif baseline != "group_mean":
            parts = torch.zeros_like(parts)
        result = torch.zeros_like(rewards)
        for rows in groups.scored_groups(parts, scored):
            values = rewards[rows]
            if baseline == "ema":
                result[rows] = values - self._moved(int(parts[rows[0]]), float(values.mean()))
            elif baseline == "none":
                result[rows] = values
            elif not groups.all_equal(values, self.config.zero_tol):
                result[rows] = values - values.mean()
        return result, {}

    def _moved(self, agent: int, mean: float) -> float:
        """The agent's average as it was; it moves towards `mean` afterwards."""
        before, decay = self._averages.get(agent, 0.0), self.config.decay
        self._averages[agent] = decay * before + (1 - decay) * mean
        return before

    def state(self) -> dict[str, float]:
        """One moving average per agent: `ema/<agent_id>`."""
        return {f"{STATE_PREFIX}{agent}": value for agent, value in self._averages.items()}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Continue with these moving averages."""
        self._averages = {int(k.removeprefix(STATE_PREFIX)): v for k, v in state.items()}
