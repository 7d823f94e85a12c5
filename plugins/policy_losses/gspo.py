"""GSPO: one importance ratio per response, clipped as a whole (arXiv:2507.18071, eq. 5)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from posttrain.plugins.policy_losses.ppo_clip import PpoClipConfig, PpoClipLoss


class GspoConfig(PpoClipConfig):
    """Settings of `gspo`: those of `ppo_clip`, with the paper's bounds."""

    clip_low: float = Field(default=3e-4, ge=0, le=1, description="ratio floor is 1 - clip_low")
    clip_high: float = Field(
        default=4e-4, ge=0, le=1_000, description="ratio ceiling is 1 + clip_high"
    )
    ratio_level: Literal["token", "segment", "sequence"] = Field(
        default="sequence",
        description="one ratio per response, or per segment of it; token makes it ppo_clip",
    )


class GspoLoss(PpoClipLoss):
    """l_i = max(-A_i s_i, -A_i clip(s_i, ...)), s_i = exp(mean_t(logprobs - old_logprobs)).

    The response's value stands at each of its tokens [B, T]. The gradient in a token's log-prob is
    -A_i s_i / |y_i| per unit of l_i; a clipped response has exactly none, in all of its tokens. A
    garbled tail makes s_i small: with the last 50 of 100 tokens at a ratio of 1e-6 the good half
    keeps 0.001 of its gradient (A > 0), or loses all (A < 0). `ratio_level: segment` lets a tail
    move its own segments alone. It is `ppo_clip` with `ratio_level: sequence`.
    Source: GSPO, arXiv:2507.18071, eq. 5 and 7.
    """

    name = "gspo"
    Config = GspoConfig
