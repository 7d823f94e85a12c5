"""Ziegler's proportional controller: the KL coefficient follows a target (arXiv:1909.08593)."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from posttrain.core.contracts import MovingController, StartConfig
from posttrain.core.errors import RunError
from posttrain.core.math.kl import proportional_factor


class AdaptiveConfig(StartConfig):
    """Settings of `adaptive`."""

    coef: float = Field(
        default=0.2,
        gt=0,
        le=1_000_000,
        description="coefficient before the first update (authors' runs: 0.15)",
    )
    target: float = Field(default=6.0, gt=0, description="KL to hold, nats per kl_unit (verl: 0.1)")
    kl_unit: Literal["sequence", "token"] = Field(
        default="sequence",
        description="what target counts: nats of a whole response, or of one token (verl, SkyRL)",
    )
    horizon: float = Field(
        default=10000.0,
        gt=0,
        description="responses; coef changes by the fraction error * rows / horizon",
    )
    clip: float = Field(
        default=0.2, gt=0, description="bound of the relative error KL / target - 1"
    )

    @model_validator(mode="after")
    def _target_has_the_unit(self) -> AdaptiveConfig:
        if self.kl_unit == "token" and "target" not in self.model_fields_set:
            raise ValueError(
                "kl_unit: token needs a target of its own (say 0.1): the default of 6 nats is per "
                "response"
            )
        return self


class AdaptiveController(MovingController[AdaptiveConfig]):
    """coef_{n+1} = coef_n (1 + e n_rows / horizon), e = clip(KL / target - 1, -clip, clip).

    KL above the target raises the coefficient, below it lowers it. A batch uses the coefficient
    from before its own update. A KL that is not finite (nothing was measured) changes nothing.
    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
    """

    name = "adaptive"
    Config = AdaptiveConfig

    def target(self) -> tuple[Literal["token", "sequence"], float]:
        """`target`, of what `kl_unit` says."""
        return self.config.kl_unit, self.config.target

    def update(self, kl_per_token: float, kl_per_sequence: float, num_rows: int) -> None:
        """Move the coefficient by the error of one rollout batch."""
        config = self.config
        measured = kl_per_token if config.kl_unit == "token" else kl_per_sequence
        if num_rows * config.clip >= config.horizon:
            raise RunError(
                f"kl_controller 'adaptive': {num_rows} responses per step against a horizon of "
                f"{config.horizon:g} could turn the coefficient negative: set horizon above "
                f"{num_rows * config.clip:g}, better several times the responses of a step"
            )
        if math.isfinite(measured):
            self.coef *= proportional_factor(
                measured, config.target, num_rows, config.horizon, config.clip
            )
