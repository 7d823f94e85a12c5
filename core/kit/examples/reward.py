"""A reward for short answers."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from posttrain.core.contracts import PluginConfig, Reward
from posttrain.core.types import RewardSample, Score


class ExampleConfig(PluginConfig):
    """Settings of `example`."""

    max_tokens: int = Field(default=64, ge=1, description="responses of this length or more get 0")


class Example(Reward[ExampleConfig]):
    """R = max(0, 1 - n / max_tokens), n the tokens of a response. Source: an example."""

    name = "example"
    Config = ExampleConfig

    def score(self, samples: Sequence[RewardSample]) -> list[Score]:
        """One score in [0, 1] per sample, in order; `Score(None, "unscored", why)` for no score."""
        limit = self.config.max_tokens
        return [Score(max(0.0, 1 - len(sample.response_ids) / limit)) for sample in samples]
