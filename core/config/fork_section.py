"""Stages that take optimizer steps, and where the first of these may come from: another run."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from posttrain.core.config.base import Section, StageBase


class ForkSection(Section):
    """The stage of another run whose first steps this stage shares, by content.

    `posttrain fork` writes it. The stage begins with the weights, the optimizer and the metrics
    that the other one had after `step`, and computes only what comes later.
    """

    stage: str = Field(
        pattern=r"^[a-z][a-z0-9_]*/[0-9a-f]{64}$",
        description="NAME/IDENTITY of that stage, as a run's run.json has it",
    )
    step: int = Field(ge=1, le=10**9, description="the last step that is shared")
    seed: int | None = Field(
        default=None,
        ge=0,
        lt=2**63,
        description="of what is drawn after that step; null = as the run's seed would have it",
    )

    @property
    def name(self) -> str:
        """The name of the stage that is forked."""
        return self.stage.partition("/")[0]

    @property
    def identity(self) -> str:
        """The identity of the stage that is forked."""
        return self.stage.partition("/")[2]


class ForkedFromSection(Section):
    """The run that this one was forked from. People read it; it decides nothing."""

    run: str = Field(min_length=1, description="id of the run")
    stage: str = Field(min_length=1, description="where it was forked")
    step: int | None = Field(
        default=None, ge=1, le=10**9, description="the last shared step; null = before the stage"
    )


class StepStage(StageBase):
    """A stage that takes optimizer steps, and whose first ones may be those of another run."""

    takes_steps = True

    fork: ForkSection | None = Field(
        default=None, description="begin with the first steps of another run's stage; null = none"
    )

    @model_validator(mode="after")
    def _goes_beyond_its_fork(self) -> Self:
        steps = getattr(self, "steps", None)
        if self.fork is not None and isinstance(steps, int) and steps <= self.fork.step:
            raise ValueError(
                f"steps is {steps}, and the first {self.fork.step} are shared (fork.step), so none "
                "is left to compute; raise steps, which count the shared ones, or fork earlier"
            )
        return self
