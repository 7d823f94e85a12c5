"""The stages `distill` and `record_teacher` in the YAML: learning from a teacher, no rewards."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from posttrain.core.config.base import Component, StageBase
from posttrain.core.config.rl_stage import RewardComponent, RlStage
from posttrain.core.config.sections import GenerationSection
from posttrain.core.config.teachers import TeacherSection

RECORDED = "recorded"
"""The input that is a teacher's record."""


class DistillStage(RlStage):
    """An `rl` stage whose defaults are those of learning from a teacher. Reads `model` and either
    `teacher`, what `teachers` lists, or `recorded`.
    """

    may_read = {**RlStage.may_read, RECORDED: "teacher_record"}

    # pydantic takes the narrower list of a subclass; for mypy it is another type.
    kind: Literal["distill"]  # type: ignore[assignment]
    algorithm: Component = Component(name="gkd")
    prompts_per_step: int = Field(default=32, ge=1)
    num_generations: int = Field(
        default=1, ge=1, le=1_000_000, description="responses per prompt (group size)"
    )
    rewards: tuple[RewardComponent, ...] = Field(
        default=(), description="summed; [] where nothing that is learned depends on rewards"
    )
    recorded: str | None = Field(
        default=None,
        min_length=1,
        description="folder that a stage `record_teacher` made, in place of a teacher; null = the "
        "input `recorded`, if there is one",
    )

    @model_validator(mode="after")
    def _one_record(self) -> DistillStage:
        if self.recorded is not None and RECORDED in self.inputs:
            raise ValueError(
                "recorded and inputs.recorded both say what is learned from; remove one of them"
            )
        if self.learns_from_record and self.teachers:
            raise ValueError(
                "a stage learns from a record or from teachers; remove `recorded`, or the "
                f"teacher(s) {', '.join(self.teachers)}"
            )
        if self.learns_from_record and "dataset" in self.inputs:
            raise ValueError(
                "the problems of this stage are those of the record; remove inputs.dataset"
            )
        return self

    @property
    def learns_from_record(self) -> bool:
        return self.recorded is not None or RECORDED in self.inputs

    def beyond_preset(self) -> dict[str, object]:
        """A record has a teacher's best candidates, and rows that the policy did not sample."""
        if not self.learns_from_record:
            return {}
        candidates = {"name": "gkd", "support": "topk", "of": "teacher"}
        given = {} if self.distillation is None else self.distillation.fields()
        if given.get("support", "topk") != "topk":
            del candidates["of"]  # it is of that support alone
        return {"on_policy_share": 0.0, "distillation": candidates}

    def outside_paths(self) -> dict[str, str]:
        found = super().outside_paths()
        return found if self.recorded is None else {**found, RECORDED: self.recorded}


class RecordTeacherStage(StageBase):
    """What a teacher says of answers, written down. Reads `model`: the teacher, or with `teacher`
    the model whose tokens are recorded.

    A `distill` stage learns from it without the teacher.
    """

    reads = {"model": "model"}
    may_read = {"dataset": "dataset"}
    makes = "teacher_record"
    repeatable = True
    without_effect = ("micro_batch_size",)

    kind: Literal["record_teacher"]
    teacher: TeacherSection | None = Field(
        default=None,
        description="a teacher behind a vLLM server (base_url and model), which has the tokens of "
        "the input `model`; null = the input `model`",
    )
    num_problems: int = Field(
        default=1024, ge=1, description="training problems; all there are, if fewer"
    )
    answers: Literal["worked", "sampled"] = Field(
        default="worked",
        description="worked: the data's; sampled: those that the teacher samples itself",
    )
    num_generations: int = Field(
        default=1, ge=1, le=10_000, description="of sampled answers, how many to each problem"
    )
    generation: GenerationSection = Field(
        default=GenerationSection(),
        description="how answers are sampled; worked ones are cut at max_response_length. The "
        "log-probs are at its temperature",
    )
    top_k: int = Field(
        default=32, ge=1, le=100_000, description="candidates that are kept at each token"
    )
    rows_per_file: int = Field(
        default=1024,
        ge=1,
        le=1_000_000,
        description="answers in a file; an interrupted stage goes on after the last whole one",
    )
    micro_batch_size: int = Field(default=32, ge=1, description="answers per forward pass")

    @model_validator(mode="after")
    def _fits_together(self) -> RecordTeacherStage:
        if self.answers == "worked" and self.num_generations > 1:
            raise ValueError(
                "a problem has one worked answer; set num_generations: 1, or answers: sampled"
            )
        for name in ("top_p", "top_k"):
            usual = GenerationSection.model_fields[name].default
            if self.answers == "worked" and getattr(self.generation, name) != usual:
                raise ValueError(
                    f"generation.{name} is of sampled answers, and worked ones are there already; "
                    "remove it, or set answers: sampled"
                )
        if self.generation.temperature == 0:
            raise ValueError(
                "at generation.temperature 0 every log-prob is 0 or minus infinity; use a value "
                "above 0, such as 1.0"
            )
        if self.teacher is None:
            return self
        if self.teacher.base_url is None:
            raise ValueError(
                "`teacher` is for a server: set teacher.base_url and teacher.model, or leave it "
                "out and name the teacher as inputs.model"
            )
        if self.teacher.routes:
            raise ValueError("one teacher is recorded, for all problems: remove teacher.routes")
        if self.generation.temperature != 1:
            raise ValueError(
                "a server gives log-probs at temperature 1: set generation.temperature: 1.0"
            )
        return self

    @property
    def problems_per_file(self) -> int:
        return max(1, self.rows_per_file // self.num_generations)

    def needs_task(self) -> str:
        return "problems"

    def max_sequences(self) -> int:
        return self.problems_per_file * self.num_generations if self.samples_here else 0

    @property
    def samples_here(self) -> bool:
        """Whether the run's engine samples the answers."""
        return self.answers == "sampled" and self.teacher is None
