"""A rollout correction: importance weights per token, cut at a bound."""

from __future__ import annotations

from pydantic import Field

from posttrain.core.contracts import GeneralCorrection, WeightedConfig
from posttrain.core.math.correction import Weighting


class ExampleConfig(WeightedConfig):
    """Settings of `example`."""

    high: float = Field(default=2.0, ge=1, description="larger weights are cut to it")


class Example(GeneralCorrection[ExampleConfig]):
    """w = min(exp(old_logprobs - rollout_logprobs), high), [B, T].

    Source: IMPALA, arXiv:1802.01561, section 4. The base class masks, detaches and makes metrics;
    without an error of the engine's every weight is exactly 1.
    """

    name = "example"
    Config = ExampleConfig

    def weighting(self) -> Weighting:
        """One weight per token."""
        return Weighting("token", high=self.config.high, batch_norm=self.config.batch_norm_w)
