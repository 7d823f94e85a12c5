"""Truncated importance sampling of whole responses."""

from __future__ import annotations

from pydantic import Field

from posttrain.core.contracts import GeneralCorrection, WeightedConfig
from posttrain.core.math.correction import Weighting


class TisSeqConfig(WeightedConfig):
    """Settings of `tis_seq`."""

    high: float = Field(
        default=2.0, ge=1, description="larger weights are cut to it (verl: 2, SkyRL: 5, TRL: 3)"
    )
    low: float | None = Field(
        default=None, ge=0, le=1, description="smaller weights are raised to it (TRL)"
    )


class TisSeq(GeneralCorrection[TisSeqConfig]):
    """w_i = min(e^(sum_t d_it), high) on every token of response i, d = old - rollout log-probs.

    Without the cut it is the unbiased weight; its logarithm grows with the response's length.
    Source: IMPALA, arXiv:1802.01561, section 4, over sequences; verl 0.9.1, `sequence`.
    """

    name = "tis_seq"
    Config = TisSeqConfig

    def weighting(self) -> Weighting:
        """One weight per response."""
        return Weighting(
            "seq",
            low=self.config.low or 0.0,
            high=self.config.high,
            batch_norm=self.config.batch_norm_w,
        )
