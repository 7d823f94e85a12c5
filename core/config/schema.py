"""The whole YAML as one pydantic tree. Unknown keys are errors everywhere."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Mapping
from string import Formatter
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    SerializeAsAny,
    TypeAdapter,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from posttrain.core.config.alarms import AlarmsSection
from posttrain.core.config.base import NO_TASK, Component, Section, StageBase
from posttrain.core.config.cluster_section import ClusterSection
from posttrain.core.config.distill_stage import DistillStage, RecordTeacherStage
from posttrain.core.config.evaluation_stages import BenchmarkStage, EvaluateStage
from posttrain.core.config.fork_section import ForkedFromSection
from posttrain.core.config.gate_stages import ApproveStage, NewDataStage, PromoteStage
from posttrain.core.config.preference_stages import (
    PreferenceStage,
    ProcessRewardModelStage,
    RewardModelStage,
)
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.config.sections import (
    EvaluationSection,
    GenerationSection,
    KeepSection,
    LimitsSection,
    ModelSection,
    RegistryAlias,
    RegistryName,
)
from posttrain.core.config.sft_stage import SftStage
from posttrain.core.config.variants import VariantsSection
from posttrain.core.contracts.stage import StageName

if TYPE_CHECKING:
    from posttrain.core.plugin_manager import PluginManager

REWRITE = """\
Rewrite a mathematics problem so that its answer is a single integer. Keep everything that the \
problem says, and change only what it asks for, so that the new answer follows from the old one. \
For example, if the answer is 11 - 2\\sqrt{6}, add: The original answer has the form \
k - m\\sqrt{n}, where k, m and n are integers. Find k + m + n. The new answer is then 19.

Problem: {question}
Answer: {answer}

Reply with the rewritten problem and its integer answer, in exactly this form:
Problem: <the whole rewritten problem>
Answer: <the integer>"""


class TransformStage(StageBase):
    """Rewrites training problems so that answers are integers, and keeps what verifies (DAPO).

    Reads `model`, makes a `dataset`, which an `rl` stage reads as its training problems.
    """

    reads = {"model": "model"}
    makes = "dataset"
    repeatable = True

    kind: Literal["transform"]
    num_problems: int = Field(
        default=256, ge=1, description="training problems to look at; all there are, if fewer"
    )
    rewrite: Literal["rules", "model", "both"] = Field(
        default="both",
        description="rules: closed forms only, checked by arithmetic; model: by the model, checked "
        "by its own solutions; both: rules first. Integers pass unchanged in any case",
    )
    prompt: str = Field(
        default=REWRITE, description="what the model is asked; needs {question} and {answer}"
    )
    num_solutions: int = Field(
        default=4, ge=1, description="solutions sampled of each problem that the model rewrote"
    )
    agreement: float = Field(
        default=0.5,
        ge=0,
        lt=1,
        description="more than this share of them must give the answer that the model claims",
    )
    generation: GenerationSection = GenerationSection(max_response_length=256)
    batch_size: int = Field(default=16, ge=1, description="problems in work at once")

    @field_validator("prompt")
    @classmethod
    def _has_places(cls, value: str) -> str:
        if "{question}" not in value or "{answer}" not in value:
            raise ValueError("expected a text with {question} and {answer} in it")
        return value

    def needs_task(self) -> str:
        return "problems"

    def max_sequences(self) -> int:
        return self.batch_size * self.num_solutions


class RegisterStage(StageBase):
    """Registers `model` in MLflow's registry with an alias. Reads `model` and `evaluation`."""

    reads = {"model": "model", "evaluation": "evaluation"}
    makes = "registration"
    sections = ("name",)
    repeatable = True

    kind: Literal["register"]
    registered_name: RegistryName = "posttrain"
    alias: RegistryAlias = "candidate"


BUILT_IN: dict[str, type[StageBase]] = {
    "evaluate": EvaluateStage,
    "benchmark": BenchmarkStage,
    "sft": SftStage,
    "reward_model": RewardModelStage,
    "process_reward_model": ProcessRewardModelStage,
    "preference": PreferenceStage,
    "rl": RlStage,
    "distill": DistillStage,
    "record_teacher": RecordTeacherStage,
    "register": RegisterStage,
    "transform": TransformStage,
    "approve": ApproveStage,
    "promote": PromoteStage,
    "new_data": NewDataStage,
}
"""The config class of each stage kind that is known before plugins are loaded."""


def stage_classes(manager: PluginManager) -> dict[str, type[StageBase]]:
    """The config class of each stage kind that is installed, the built-in ones first."""
    entries = [*manager.entries("stage"), *manager.local_stages.values()]
    found = {entry.name: entry.cls.Config for entry in entries}
    return BUILT_IN | found


def _stage(value: Any, info: ValidationInfo) -> Any:  # Any: whatever YAML held
    """A stage of the class of its kind, which the validation's context or `BUILT_IN` has.

    The kind is part of the places of pydantic's errors: `("stages", "first", "sft", "steps")`.
    """
    if not isinstance(value, dict):
        return value
    known: Mapping[str, type[StageBase]] = info.context or BUILT_IN
    kind = value.get("kind")
    if kind is None:
        raise PydanticCustomError("stage_without_kind", "no kind")
    if not isinstance(kind, str) or kind not in known:
        raise PydanticCustomError("stage_of_no_kind", "no such kind", {"kind": kind})
    return _adapter(kind, known[kind]).validate_python({kind: value}, context=info.context)[kind]


@functools.cache
def _adapter(kind: str, cls: type[StageBase]) -> TypeAdapter[dict[str, StageBase]]:
    return TypeAdapter(dict[str, cls])  # type: ignore[valid-type]


SERVERS = "vllm_server"
"""The engine whose servers `cluster.engines` starts."""
PLACES = ("name", "seed", "task", "date")
RUN_NAME_HELP = "what can be filled in is {name}, {seed}, {task} and {date}"


class RunConfig(Section):
    """One pipeline run."""

    name: str = Field(
        default="posttrain",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$",
        max_length=100,
        description="of the experiment and of deployments; not set = the config file's name",
    )
    description: str = ""
    run_name: str = Field(
        default="{name}-seed{seed}",
        max_length=200,
        description="what Prefect and MLflow call a run: {name}, {seed}, {task} and {date} are "
        "filled in",
    )
    seed: int = Field(default=0, ge=0, lt=2**63)
    engine: str | Component = Field(
        default="auto", description="auto, or a rollout engine: transformers, vllm, vllm_server"
    )
    model: ModelSection = ModelSection()
    task: Component = Field(
        default=Component(name=NO_TASK),
        description="where problems come from; left out where every stage brings its own data",
    )
    evaluation: EvaluationSection = EvaluationSection()
    limits: LimitsSection = LimitsSection()
    cluster: ClusterSection | None = Field(
        default=None,
        description="a Ray cluster for ranks, engines, rewards and environments; not set = "
        "this machine",
    )
    keep: KeepSection = KeepSection()
    forked_from: ForkedFromSection | None = Field(
        default=None, description="the run that this one was forked from; `posttrain fork` sets it"
    )
    alarms: AlarmsSection = AlarmsSection()
    variants: VariantsSection | None = Field(
        default=None, description="versions of this config that `posttrain sweep` compares"
    )
    plugin_files: dict[str, str] = Field(
        default={},
        description="short name -> path of each file that plugins are named in (FILE.py:CLASS); "
        "filled in when the config is read",
    )
    stages: dict[StageName, Annotated[SerializeAsAny[StageBase], BeforeValidator(_stage)]] = Field(
        min_length=1
    )

    @field_validator("run_name")
    @classmethod
    def _known_places(cls, template: str) -> str:
        try:
            places = [place for place in Formatter().parse(template) if place[1] is not None]
        except ValueError as error:
            raise ValueError(f"is not a template ({error}); {RUN_NAME_HELP}") from error
        odd = [name for _, name, form, cast in places if name not in PLACES or form or cast]
        if odd or not template.strip():
            what = f"has {{{odd[0]}}}" if odd else "is empty"
            raise ValueError(f"{what}; {RUN_NAME_HELP}")
        return template

    @model_validator(mode="after")
    def _ranks_to_keep(self) -> Self:
        if self.cluster is None:
            return self
        least, copy = self.cluster.learner.min_ranks, self.cluster.learner.shard_size
        if least > self.limits.learner_ranks:
            raise ValueError(
                f"cluster.learner.min_ranks is {least}, expected at most limits.learner_ranks "
                f"({self.limits.learner_ranks})"
            )
        if copy is not None and self.limits.learner_ranks % copy:
            raise ValueError(
                f"cluster.learner.shard_size is {copy}, expected a divisor of limits.learner_ranks "
                f"({self.limits.learner_ranks})"
            )
        return self

    @model_validator(mode="after")
    def _servers_of_the_cluster(self) -> Self:
        if self.cluster is None or self.cluster.engines is None:
            return self
        name = self.engine if isinstance(self.engine, str) else self.engine.name
        if name != SERVERS:
            raise ValueError(
                f"cluster.engines starts servers of engine {SERVERS}, and engine is {name}: set "
                f"engine: {SERVERS}, or remove cluster.engines"
            )
        fields = {} if isinstance(self.engine, str) else self.engine.fields()
        if own := [name for name in ("urls", "replicas", "gpus") if fields.get(name)]:
            raise ValueError(
                f"cluster.engines starts the servers on the cluster's nodes, and engine.{own[0]} "
                "is set: remove one of them"
            )
        return self

    @property
    def trains_elsewhere(self) -> bool:
        """Whether models are trained in other processes than the run's."""
        return self.limits.learner_ranks > 1 or self.cluster is not None

    @property
    def train_here(self) -> str:
        """What to do so that this process trains, for the end of a sentence."""
        alone = "set limits.learner_ranks: 1"
        return alone if self.cluster is None else f"{alone} and remove the section cluster"

    def title(self, day: datetime.date) -> str:
        title = self.run_name.format(
            name=self.name, seed=self.seed, task=self.task.shown, date=day.isoformat()
        )
        origin = self.forked_from
        if origin is None:
            return title
        step = "" if origin.step is None else f" step {origin.step}"
        return f"{title} fork of {origin.run[:8]} {origin.stage}{step}"
