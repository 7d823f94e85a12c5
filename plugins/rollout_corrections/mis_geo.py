"""Responses masked by their geometric mean ratio; what is left weighs token by token."""

from __future__ import annotations

import math

from pydantic import Field

from posttrain.core.contracts import GeneralCorrection, WeightedConfig
from posttrain.core.math.correction import Rejection, Weighting


class MisGeoConfig(WeightedConfig):
    """Settings of `mis_geo`."""

    low: float = Field(
        default=0.999, gt=0, le=1, description="smallest mean ratio kept (NeMo-RL; SkyRL: 0.99)"
    )
    high: float = Field(
        default=1.002, ge=1, description="largest mean ratio kept (NeMo-RL; SkyRL: 1.01)"
    )
    cap: float | None = Field(
        default=None, ge=1, description="larger token weights are cut to it; null = no cut"
    )


class MisGeo(GeneralCorrection[MisGeoConfig]):
    """Keep response i iff low <= e^(mean_t d_it) <= high; its tokens weigh w_t = e^d_t.

    d = old - rollout log-probs. The mean does not grow with the length, as `mis_seq`'s sum does:
    the two ratios differ by the power of the number of tokens.
    Source: NeMo-RL 7ea279abf, `seq-mask-tis`.
    """

    name = "mis_geo"
    Config = MisGeoConfig

    def weighting(self) -> Weighting:
        """One weight per token, cut only if asked."""
        high = math.inf if self.config.cap is None else self.config.cap
        return Weighting("token", high=high, batch_norm=self.config.batch_norm_w)

    def rejections(self) -> tuple[Rejection, ...]:
        """The mean ratio's bounds, as bounds of the mean of k1 = -d, and the config's own."""
        bounds = -math.log(self.config.high), -math.log(self.config.low)
        mean_ratio = Rejection("k1", "seq_mean", low=bounds[0], high=bounds[1])
        return (mean_ratio, *super().rejections())
