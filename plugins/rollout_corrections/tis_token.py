"""Truncated importance sampling, token by token."""

from __future__ import annotations

from pydantic import Field

from posttrain.core.contracts import GeneralCorrection, WeightedConfig
from posttrain.core.math.correction import Weighting


class TisTokenConfig(WeightedConfig):
    """Settings of `tis_token`."""

    high: float = Field(
        default=2.0, ge=1, description="larger weights are cut to it (verl, slime: 2)"
    )
    low: float | None = Field(
        default=None, ge=0, le=1, description="smaller weights are raised to it (OpenRLHF)"
    )


class TisToken(GeneralCorrection[TisTokenConfig]):
    """w_t = min(e^d_t, high) with d = old_logprobs - rollout_logprobs, [B, T], optionally >= low.

    Biased by its cut and by leaving out the prefix's ratio, with a variance of at most high^2.
    Source: IMPALA, arXiv:1802.01561, section 4; for engines: verl 0.9.1 and slime.
    """

    name = "tis_token"
    Config = TisTokenConfig

    def weighting(self) -> Weighting:
        """One weight per token."""
        return Weighting(
            "token",
            low=self.config.low or 0.0,
            high=self.config.high,
            batch_norm=self.config.batch_norm_w,
        )
