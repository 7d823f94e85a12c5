"""n-step advantages: n rewards, then the critic's value (Sutton 1988)."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from posttrain.core.contracts import ValueAdvantage, ValueConfig
from posttrain.core.math.returns import ValuedSteps, n_step


class NStepConfig(ValueConfig):
    """Settings of the `n_step` advantage."""

    n: int = Field(
        default=5, ge=1, description="tokens whose rewards are summed before the value takes over"
    )


class NStepAdvantage(ValueAdvantage[NStepConfig]):
    """A_t = sum_{l<n} gamma^l r_{t+l} + gamma^n V_{t+n} - V_t; `returns` [B, T] = A + V.

    t counts sampled tokens only; rewards and values are 0 past the end. n = 1 is `a2c`, and n >= T
    is `gae` with lam 1, both unwhitened. Source: Sutton, Machine Learning 3 (1988).
    """

    name = "n_step"
    Config = NStepConfig

    def advantages_and_targets(self, steps: ValuedSteps) -> tuple[Tensor, Tensor]:
        """The n-step difference, and the same + V."""
        advantages = n_step(steps, self.config.gamma, self.config.n)
        return advantages, advantages + steps.values.double()
