"""Stages that decide whether a run goes on: `approve`, `promote` and `new_data`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from posttrain.core.config.base import StageBase
from posttrain.core.config.sections import (
    RegistryAlias,
    RegistryName,
)


class ApproveStage(StageBase):
    """Asks a person whether the model may go on. Reads `model`, `evaluation`, maybe `baseline`.

    Passes the model on: what reads this stage waits for the answer. The answer is kept for this
    very model with these very evaluations, and is never taken for another.
    """

    reads = {"model": "model", "evaluation": "evaluation"}
    may_read = {"baseline": "evaluation"}
    makes = "model"
    passes_on = "model"
    sections = ()
    without_effect = ("samples", "timeout_hours", "on_timeout")
    outlives_code = True

    kind: Literal["approve"]
    question: str = Field(default="May this model go on?", min_length=1)
    samples: int = Field(
        default=6, ge=0, le=10_000, description="problems with answers that are shown"
    )
    timeout_hours: float | None = Field(
        default=168.0,
        gt=0,
        le=87_600,
        description="how long an answer is waited for; null = for ever",
    )
    on_timeout: Literal["reject", "approve"] = Field(
        default="reject", description="what no answer in that time means"
    )


class PromoteStage(StageBase):
    """Makes `model` the champion if it is better. Reads `model`, `evaluation`, maybe `baseline`.

    The champion of the registry is measured as the evaluation was, on the same problems, or its
    evaluation is taken from `baseline`. The alias moves if the 95 % interval of the paired
    difference lies above `min_improvement`, or if there is no champion yet.
    """

    reads = {"model": "model", "evaluation": "evaluation"}
    may_read = {"baseline": "evaluation"}
    makes = "registration"
    sections = ("seed", "task", "engine", "model")

    kind: Literal["promote"]
    registered_name: RegistryName = "posttrain"
    alias: RegistryAlias = "champion"
    min_improvement: float = Field(
        default=0.0, ge=-1, lt=1, description="share of problems; below 0 allows a small loss"
    )
    measure: Literal["greedy", "sampled"] = Field(
        default="greedy", description="right greedy answers, or the share of right samples"
    )


class NewDataStage(StageBase):
    """Training problems that no earlier run of this config was trained on. Makes a `dataset`.

    Rows count as trained on once a run has finished with them. With fewer than `min_rows` the run
    ends at once.
    """

    makes = "dataset"
    sections = ()
    without_effect = ("min_rows", "max_rows")

    kind: Literal["new_data"]
    min_rows: int = Field(default=1, ge=1, description="fewer new rows than this are left to wait")
    max_rows: int | None = Field(
        default=None, ge=1, description="of one run; the others are for the next. null = all"
    )

    @model_validator(mode="after")
    def _room(self) -> NewDataStage:
        if self.max_rows is not None and self.max_rows < self.min_rows:
            raise ValueError(
                f"max_rows ({self.max_rows}) is below min_rows ({self.min_rows}): no run could "
                "ever begin; raise one or lower the other"
            )
        return self

    def needs_task(self) -> str:
        return "problems"
