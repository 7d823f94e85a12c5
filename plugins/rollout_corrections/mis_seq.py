"""Masked importance sampling of whole responses."""

from __future__ import annotations

from pydantic import Field

from posttrain.core.contracts import GeneralCorrection, WeightedConfig
from posttrain.core.math.correction import Weighting


class MisSeqConfig(WeightedConfig):
    """Settings of `mis_seq`."""

    high: float = Field(default=3.0, ge=1, description="larger weights become 0 (TRL: 3)")
    low: float | None = Field(
        default=None, ge=0, le=1, description="smaller weights become 0; null = no lower bound"
    )


class MisSeq(GeneralCorrection[MisSeqConfig]):
    """w_i = e^(sum_t d_it) on every token of response i where low <= it <= high, else 0.

    d = old - rollout log-probs. A single token far off costs the whole response.
    Source: TRL 1.16, `vllm_importance_sampling_mode: sequence_mask` (its default).
    """

    name = "mis_seq"
    Config = MisSeqConfig

    def weighting(self) -> Weighting:
        """One weight per response."""
        config = self.config
        return Weighting("seq", "mask", config.low or 0.0, config.high, config.batch_norm_w)
