"""A transform of advantages: the teacher's opinion of a token, bounded."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import Advantages, AdvantageTransform, PluginConfig
from posttrain.core.math.masking import masked
from posttrain.core.math.teacher_gap import teacher_gap


class ExampleConfig(PluginConfig):
    """Settings of `example`."""

    bound: float = Field(default=2.0, gt=0, le=100, description="most that a token counts, nats")


class Example(AdvantageTransform[ExampleConfig]):
    """A'_t = A_t + clip(teacher_logprobs - rollout_logprobs, +-bound) [B, T]. Source: mine."""

    name = "example"
    Config = ExampleConfig
    needs = frozenset({"teacher_logprobs", "rollout_logprobs"})

    def transform(self, advantages: Tensor, batch: RolloutBatch) -> Advantages:
        """Advantages [B, T]."""
        bound = self.config.bound
        gap = teacher_gap(batch, "rollout").clamp(-bound, bound)
        return Advantages((masked(advantages.double(), batch.mask) + gap).to(advantages.dtype))
