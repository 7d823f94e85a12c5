"""On-policy distillation: the advantage of a token is what the teacher would rather have."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import Advantages, AdvantageTransform, PluginConfig
from posttrain.core.math.masking import masked
from posttrain.core.math.returns import rewards_to_go
from posttrain.core.math.teacher_gap import teacher_gap


class OpdConfig(PluginConfig):
    """Settings of `opd`."""

    coef: float = Field(default=1.0, ge=0, le=1_000, description="factor of the teacher's part")
    anchor: Literal["old", "rollout"] = Field(
        default="old",
        description="whose log-probs the teacher's are compared with: the trainer's of before the "
        "update, or the engine's",
    )
    gamma: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="share of the next token's part that a token takes over; 0 = its own alone, 1 "
        "= the gradient of the whole response's KL",
    )
    clamp: float | None = Field(
        default=None,
        gt=0,
        le=1_000,
        description="bound of a token's part, nats; null = off (5 to 10 for a greedy teacher)",
    )


class OpdTransform(AdvantageTransform[OpdConfig]):
    """A'_t = A_t + coef * sum_{k >= t} gamma^(k - t) a_k, a = teacher_logprobs - anchor's [B, T].

    Log-probs are in nats at the sampling temperature. With gamma 0 the gradient is that of
    KL(policy || teacher) at each token with its prefix held fixed; it is 0 where both agree. Alone,
    use the advantage `zero`.
    Source: Thinking Machines, "On-policy distillation" (2025); arXiv:2306.13649.
    """

    name = "opd"
    Config = OpdConfig

    def required_columns(self) -> frozenset[str]:
        return frozenset({"teacher_logprobs", f"{self.config.anchor}_logprobs"})

    def carries_signal(self) -> bool:
        return self.config.coef != 0

    def transform(self, advantages: Tensor, batch: RolloutBatch) -> Advantages:
        """Advantages [B, T]."""
        config, part = self.config, teacher_gap(batch, self.config.anchor)
        if config.clamp is not None:
            part = part.clamp(-config.clamp, config.clamp)
        if config.gamma > 0:
            part = rewards_to_go(part, batch.mask, config.gamma)
        changed = masked(advantages.double(), batch.mask) + config.coef * part
        return Advantages(changed.to(advantages.dtype))
