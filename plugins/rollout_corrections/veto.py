"""Drop responses with a token that the trainer finds all but impossible."""

from __future__ import annotations

import math

from pydantic import Field

from posttrain.core.contracts import CorrectionConfig, GeneralCorrection
from posttrain.core.math.correction import Rejection


class VetoConfig(CorrectionConfig):
    """Settings of `veto`."""

    threshold: float = Field(
        default=1e-4, ge=1e-8, le=1, description="smallest e^d of any token that is kept"
    )


class Veto(GeneralCorrection[VetoConfig]):
    """Drop response i iff e^d_it < threshold for any token t; no weight, d = old - rollout.

    Such a token is mostly a fault of the engine, and its response was conditioned on it.
    Source: verl b178a3cd5, `rollout_token_veto_threshold`.
    """

    name = "veto"
    Config = VetoConfig

    def rejections(self) -> tuple[Rejection, ...]:
        """The largest k1 = -d of a response, and the config's own."""
        worst = Rejection("k1", "seq_max", high=-math.log(self.config.threshold))
        return (worst, *super().rejections())
