"""Coefficients of loss terms: a number, or a schedule over the steps of the stage."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, model_validator

from posttrain.core.config.base import Section


class CoefSchedule(Section):
    """A coefficient that changes from step to step: 0 to `peak`, then down to `valley`."""

    peak: float = Field(ge=0, le=1_000, description="the coefficient after the warm-up")
    warmup: int = Field(
        default=0, ge=0, le=10_000_000, description="steps from 0 to `peak`, in a line"
    )
    decay: int = Field(
        default=0,
        ge=0,
        le=10_000_000,
        description="steps from `peak` to `valley` after the warm-up, along half a cosine",
    )
    valley: float | None = Field(
        default=None, ge=0, le=1_000, description="the coefficient after that; null = `peak`"
    )
    complement: bool = Field(
        default=False,
        description="multiply the stage's other policy losses by 1 - this coefficient (CHORD)",
    )

    @model_validator(mode="after")
    def _fits(self) -> CoefSchedule:
        if (self.decay > 0) is (self.valley is None):
            raise ValueError(
                "`decay` is the number of steps from `peak` to `valley`: give both, or neither for "
                "a coefficient that stays at its peak"
            )
        if self.complement and max(self.peak, self.valley or 0.0) > 1:
            raise ValueError(
                "with complement: true the other losses count 1 - coefficient, which must not be "
                "below 0; use a peak and a valley of at most 1"
            )
        return self

    def at(self, step: int) -> float:
        """The coefficient of the rollout batch `step`, counted from 1; a function of it alone."""
        if step < self.warmup:
            return self.peak * step / self.warmup
        if self.valley is None:
            return self.peak
        done = min(1.0, (step - self.warmup) / self.decay)
        return self.valley + (self.peak - self.valley) * (1 + math.cos(math.pi * done)) / 2


def is_always(coef: float | CoefSchedule, value: float) -> bool:
    """Whether a coefficient has this value at every step."""
    if not isinstance(coef, CoefSchedule):
        return coef == value
    start = {0.0} if coef.warmup > 1 else set()
    return start | {coef.peak, coef.peak if coef.valley is None else coef.valley} == {value}


def _is_schedule(value: Any) -> str:  # Any: whatever YAML held
    return "a schedule" if isinstance(value, dict | CoefSchedule) else "a number"


Coefficient = Annotated[
    Annotated[float, Tag("a number"), Field(ge=0, le=1_000)]
    | Annotated[CoefSchedule, Tag("a schedule")],
    Discriminator(_is_schedule),
]
"""`coef: 0.1`, or `coef: {warmup: 10, peak: 0.5, decay: 100, valley: 0.02}`."""


def coef_at(coef: float | CoefSchedule, step: int) -> float:
    """The coefficient in force for the rollout batch `step`."""
    return coef.at(step) if isinstance(coef, CoefSchedule) else coef
