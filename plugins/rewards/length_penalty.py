"""A price on every token of a response."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from posttrain.core.contracts import PluginConfig, Reward
from posttrain.core.types import RewardSample, Score


class LengthPenaltyConfig(PluginConfig):
    """Settings of `length_penalty`."""

    alpha: float = Field(default=0.001, ge=0, description="price of one token, in units of reward")
    free_tokens: int = Field(default=0, ge=0, description="tokens that cost nothing")


class LengthPenaltyReward(Reward[LengthPenaltyConfig]):
    """R_i = -alpha max(0, T_i - free_tokens), T_i the tokens of the response.

    Added to a reward for being right, it is R - alpha T. T counts the end-of-sequence token, and is
    not divided by anything: at alpha 0.001 a thousand tokens cost as much as a right answer earns.
    Source: a constant price per token, applied once, where the reward is: at the last token.
    """

    name = "length_penalty"
    Config = LengthPenaltyConfig
    runs_in = "host"
    after_clip = True

    def score(self, samples: Sequence[RewardSample]) -> list[Score]:
        """One score per sample, in order; never unscored."""
        alpha, free = self.config.alpha, self.config.free_tokens
        # 0.0 first: the price of nothing is 0, not -0.
        return [Score(0.0 - alpha * max(0, len(s.response_ids) - free)) for s in samples]
