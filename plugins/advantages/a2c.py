"""A2C's one-step advantage (arXiv:1602.01783)."""

from __future__ import annotations

from torch import Tensor

from posttrain.core.contracts import ValueAdvantage, ValueConfig
from posttrain.core.math.returns import ValuedSteps, gae


class A2cAdvantage(ValueAdvantage[ValueConfig]):
    """A_t = r_t + gamma * V_{t+1} - V_t; the critic's target is r_t + gamma * V_{t+1}.

    V is detached [B, T] and 0 past the end. Equal to `gae` with lam 0, and to `n_step` with n 1,
    unless they are whitened. Source: Mnih et al., arXiv:1602.01783, section 4.
    """

    name = "a2c"
    Config = ValueConfig

    def advantages_and_targets(self, steps: ValuedSteps) -> tuple[Tensor, Tensor]:
        """The temporal difference, and the same + V."""
        advantages = gae(steps, self.config.gamma, 0.0)
        return advantages, advantages + steps.values.double()
