"""TD(lambda) returns for a critic, and what they exceed its values by (Sutton 1988)."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from posttrain.core.contracts import ValueAdvantage, ValueConfig
from posttrain.core.math.returns import ValuedSteps, gae


class TdLambdaConfig(ValueConfig):
    """Settings of the `td_lambda` advantage."""

    lam: float = Field(
        default=0.95, ge=0, le=1, description="lambda: 1 = Monte Carlo, 0 = one-step targets"
    )


class TdLambdaAdvantage(ValueAdvantage[TdLambdaConfig]):
    """`returns` G_t = r_t + gamma * ((1 - lam) * V_{t+1} + lam * G_{t+1}), A_t = G_t - V_t.

    [B, T]; the advantage is `gae`'s, unwhitened by default: it exists for the critic's target.
    Source: Sutton, Machine Learning 3 (1988).
    """

    name = "td_lambda"
    Config = TdLambdaConfig

    def advantages_and_targets(self, steps: ValuedSteps) -> tuple[Tensor, Tensor]:
        """G - V, which is GAE, and G."""
        advantages = gae(steps, self.config.gamma, self.config.lam)
        return advantages, advantages + steps.values.double()
