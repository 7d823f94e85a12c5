"""Masked importance sampling, token by token (IcePop)."""

from __future__ import annotations

from pydantic import Field

from posttrain.core.contracts import GeneralCorrection, WeightedConfig
from posttrain.core.math.correction import Weighting


class MisTokenConfig(WeightedConfig):
    """Settings of `mis_token`."""

    low: float | None = Field(
        default=0.5, ge=0, le=1, description="smaller weights become 0; null = no lower bound"
    )
    high: float = Field(default=5.0, ge=1, description="larger weights become 0")


class MisToken(GeneralCorrection[MisTokenConfig]):
    """w_t = e^d_t where low <= e^d_t <= high, else 0; d = old_logprobs - rollout_logprobs, [B, T].

    A token far off either way has no gradient, where truncation would still give it one.
    Source: IcePop (Ring-1T), arXiv:2510.18855.
    """

    name = "mis_token"
    Config = MisTokenConfig

    def weighting(self) -> Weighting:
        """One weight per token."""
        config = self.config
        return Weighting("token", "mask", config.low or 0.0, config.high, config.batch_norm_w)
