"""Generalised advantage estimation (arXiv:1506.02438)."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from posttrain.core.contracts import ValueAdvantage, ValueConfig, WhitenedConfig
from posttrain.core.math.returns import ValuedSteps, gae


class GaeConfig(WhitenedConfig, ValueConfig):
    """Settings of the `gae` advantage."""

    lam: float = Field(
        default=1.0, ge=0, le=1, description="lambda: 1 = least bias, 0 = least variance (TRL 0.95)"
    )


class GaeAdvantage(ValueAdvantage[GaeConfig]):
    """A_t = delta_t + gamma * lam * A_{t+1}, delta_t = r_t + gamma * V_{t+1} - V_t; then whitened.

    `returns` [B, T] = A + V before whitening. Only sampled tokens are steps: V_{t+1} and A_{t+1}
    are carried over tool output. With lam = gamma = 1 and an outcome reward A_t = R - V_t; with
    lam < 1 the credit of a reward n tokens later shrinks by (gamma * lam)^n.
    Source: Schulman et al., arXiv:1506.02438, eq. 16.
    """

    name = "gae"
    Config = GaeConfig

    def advantages_and_targets(self, steps: ValuedSteps) -> tuple[Tensor, Tensor]:
        """GAE, and GAE + V."""
        advantages = gae(steps, self.config.gamma, self.config.lam)
        return advantages, advantages + steps.values.double()
