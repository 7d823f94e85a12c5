"""Monte-Carlo returns as advantages: REINFORCE without a baseline (Williams 1992)."""

from __future__ import annotations

from pydantic import Field

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import AdvantageConfig, Advantages, TokenAdvantage
from posttrain.core.math.returns import rewards_to_go


class McReturnConfig(AdvantageConfig):
    """Settings of the `mc_return` advantage."""

    gamma: float = Field(default=1.0, ge=0, le=1, description="discount per token")


class McReturnAdvantage(TokenAdvantage[McReturnConfig]):
    """A_t = G_t = sum over k >= t of gamma^(k-t) r_k, r being `token_rewards` [B, T].

    Only sampled tokens are steps: over tool output G is carried, neither discounted nor reset.
    With an outcome reward and gamma 1 every token gets R.
    Source: Williams, Machine Learning 8 (1992).
    """

    name = "mc_return"
    Config = McReturnConfig

    def token_advantages(self, batch: RolloutBatch) -> Advantages:
        """Returns of every sampled token; also what a critic is trained on."""
        rewards = batch.column("token_rewards")
        returns = rewards_to_go(rewards, batch.response_mask, self.config.gamma)
        return Advantages(returns, returns=returns)
