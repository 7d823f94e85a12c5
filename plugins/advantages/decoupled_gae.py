"""Decoupled GAE with a length-adaptive lambda, as in VAPO (arXiv:2503.01491, arXiv:2504.05118)."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from posttrain.core.contracts import ValueAdvantage, ValueConfig, WhitenedConfig
from posttrain.core.math.returns import ValuedSteps, gae


class DecoupledGaeConfig(WhitenedConfig, ValueConfig):
    """Settings of the `decoupled_gae` advantage."""

    lam_critic: float = Field(
        default=1.0, ge=0, le=1, description="lambda of the critic's targets; 1 = unbiased"
    )
    lam_policy: float | None = Field(
        default=None, ge=0, le=1, description="lambda of the advantages; null = by length (0.95)"
    )
    alpha: float = Field(
        default=0.05, gt=0, description="lambda by length is 1 - 1 / (alpha * tokens), at least 0"
    )


class DecoupledGaeAdvantage(ValueAdvantage[DecoupledGaeConfig]):
    """`returns` = GAE(lam_critic) + V; A = GAE(lam_i), lam_i = clamp(1 - 1/(alpha |y_i|), 0, 1).

    |y_i| counts the sampled tokens of row i [B]: with alpha 0.05 lambda is 0 up to 20 tokens, 0.8
    at 100 and 0.98 at 1000, so that the reach of a reward grows with the response. A is whitened.
    Source: VC-PPO, arXiv:2503.01491; VAPO, arXiv:2504.05118.
    """

    name = "decoupled_gae"
    Config = DecoupledGaeConfig

    def lambdas(self, lengths: Tensor) -> Tensor | float:
        """lambda of the advantages of responses with these lengths [B]."""
        if self.config.lam_policy is not None:
            return self.config.lam_policy
        return (1 - 1 / (self.config.alpha * lengths)).clamp(0, 1)

    def advantages_and_targets(self, steps: ValuedSteps) -> tuple[Tensor, Tensor]:
        """GAE with the policy's lambda, and GAE + V with the critic's."""
        config = self.config
        advantages = gae(steps, config.gamma, self.lambdas(steps.lengths))
        return advantages, gae(steps, config.gamma, config.lam_critic) + steps.values.double()
