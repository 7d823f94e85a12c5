"""A reward for short responses."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from posttrain.core.contracts import PluginConfig, Reward
from posttrain.core.hooks import hookimpl
from posttrain.core.types import RewardSample, Score


class BrevityConfig(PluginConfig):
    """Settings of `brevity`."""

    max_tokens: int = Field(default=64, ge=1, description="responses of this length or more get 0")


class BrevityReward(Reward[BrevityConfig]):
    """R_i = max(0, 1 - n_i / max_tokens), n_i the tokens of response i. Source: an example."""

    name = "brevity"
    Config = BrevityConfig

    def score(self, samples: Sequence[RewardSample]) -> list[Score]:
        """One score in [0, 1] per sample, in order."""
        limit = self.config.max_tokens
        return [Score(max(0.0, 1 - len(sample.response_ids) / limit)) for sample in samples]


@hookimpl
def posttrain_register() -> list[type[BrevityReward]]:
    """Offer this plugin."""
    return [BrevityReward]
