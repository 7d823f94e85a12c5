"""REINFORCE++: discounted returns, whitened over the batch, no critic (arXiv:2501.03262)."""

from __future__ import annotations

from pydantic import Field

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import Advantages, TokenAdvantage, WhitenedConfig
from posttrain.core.math.returns import rewards_to_go


class ReinforcePpConfig(WhitenedConfig):
    """Settings of the `reinforce_pp` advantage."""

    gamma: float = Field(default=1.0, ge=0, le=1, description="discount per token")


class ReinforcePpAdvantage(TokenAdvantage[ReinforcePpConfig]):
    """A_t = whiten(G_t), G_t = r_t + gamma * G_{t+1}; `returns` are G_t, not whitened.

    r_t are `token_rewards` [B, T]: the outcome on the last token, less the KL of each token in the
    paper (`kl.place: reward`, k1). G_t is carried over gaps in the mask. verl whitens with the
    unbiased variance as here, OpenRLHF and NeMo with `whiten_ddof: 0`.
    Source: Hu et al., arXiv:2501.03262.
    """

    name = "reinforce_pp"
    Config = ReinforcePpConfig

    def token_advantages(self, batch: RolloutBatch) -> Advantages:
        """Returns of every sampled token."""
        rewards = batch.column("token_rewards")
        returns = rewards_to_go(rewards, batch.response_mask, self.config.gamma)
        return Advantages(returns, returns=returns)
