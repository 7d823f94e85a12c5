"""What the environment itself gave for an episode."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.core.contracts import NoConfig, Reward
from posttrain.core.types import RewardSample, Score


class EnvironmentReward(Reward[NoConfig]):
    """R_i = the outcome of episode i: the environment's own, or the sum of its turns' rewards.

    A response whose environment gave nothing is unscored, never 0.
    Source: the return of an episode, Sutton and Barto 2018, section 3.3, without discount.
    """

    name = "environment"
    Config = NoConfig
    runs_in = "host"

    def score(self, samples: Sequence[RewardSample]) -> list[Score]:
        """One score per sample, in order."""
        return [
            Score(None, "unscored", "the environment gave no reward")
            if sample.outcome is None
            else Score(sample.outcome)
            for sample in samples
        ]
