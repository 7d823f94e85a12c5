"""PPO's clipped loss with a bound where the advantage is negative (arXiv:1912.09729)."""

from __future__ import annotations

from pydantic import Field

from posttrain.plugins.policy_losses.ppo_clip import PpoClipConfig, PpoClipLoss


class DualClipConfig(PpoClipConfig):
    """Settings of `dual_clip`: those of `ppo_clip`, with the dual clip on."""

    dual_clip_c: float | None = Field(
        default=3.0,
        gt=1,
        le=1_000_000,
        description="bound c of the loss where A < 0; null makes it ppo_clip",
    )


class DualClipLoss(PpoClipLoss):
    """l = min(l_ppo, -A c) where A < 0, else l_ppo: `ppo_clip` with `dual_clip_c: 3`.

    A bad token that the policy has made c times likelier adds no more loss and no gradient.
    Source: dual-clip PPO, arXiv:1912.09729, eq. 5.
    """

    name = "dual_clip"
    Config = DualClipConfig
