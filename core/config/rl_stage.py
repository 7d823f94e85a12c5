"""The stage `rl` in the YAML: reinforcement learning and every part of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from posttrain.core.config.base import Component, Section, distinct_names, one_or_many
from posttrain.core.config.coefficients import Coefficient, CoefSchedule
from posttrain.core.config.fork_section import StepStage
from posttrain.core.config.sampled_evaluation import SampledEvaluationSection
from posttrain.core.config.sections import (
    EnvironmentComponent,
    GenerationSection,
    LoraSection,
    OptimizerField,
    OptimizerSection,
)
from posttrain.core.config.teachers import TEACHER, RoutingSection, TeacherName, TeacherSection


class LossTermComponent(Component):
    """A policy loss with its factor in the sum and, if it has one, its own aggregator."""

    coef: Coefficient = Field(
        default=1.0,
        description="factor of this term in the loss; or its schedule over the stage's steps, "
        "{warmup, peak, decay, valley}",
    )
    aggregator: Component | None = Field(
        default=None, description="how this term is averaged; null = the stage's own `aggregator`"
    )


LossTerms = Annotated[
    Annotated[LossTermComponent, Tag("one")]
    | Annotated[tuple[LossTermComponent, ...], Tag("many"), Field(min_length=1)],
    Discriminator(one_or_many),
]
"""One term, or a list of terms that are added."""

Components = Annotated[
    Annotated[Component, Tag("one")] | Annotated[tuple[Component, ...], Tag("many")],
    Discriminator(one_or_many),
]
"""One plugin, or a list of plugins that come one after another."""


class RewardComponent(Component):
    weight: float = Field(
        default=1.0,
        ge=-1_000_000,
        le=1_000_000,
        description="factor in the weighted sum of rewards; below 0 it is a penalty",
    )
    label: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$",
        description="what metrics, tables and reports call it; null = the plugin's name, with _2 "
        "for the second reward of that name",
    )
    only_if: str | None = Field(
        default=None,
        min_length=1,
        description="label of another reward: this one counts only where that one is at least 1, "
        "and is 0 elsewhere; null = always",
    )
    tasks: tuple[str, ...] | None = Field(
        default=None,
        min_length=1,
        description="labels of the tasks of a mixture whose answers it scores, such as those that "
        "no verifier judges; null = all",
    )


RL_KINDS = ("rl", "distill")
"""Kinds of stages that are an `RlStage`: they sample, or learn as if they did, step by step."""
TRAINING_KINDS = (*RL_KINDS, "sft", "preference", "reward_model", "process_reward_model")
"""Kinds of stages that take optimizer steps, and keep evidence of them."""
TOTAL = "total"
"""What reports call the sum of the rewards."""


def reward_labels(rewards: Sequence[RewardComponent], own: Sequence[str] = ()) -> list[str]:
    """What each reward is called in records: its label, or a name that no other reward has.

    `own` are the plugins' own names, where they are not those of the config.
    """
    given = [reward.label for reward in rewards if reward.label is not None]
    names_of = own or [reward.name for reward in rewards]
    unlabelled = [n for n, reward in zip(names_of, rewards, strict=True) if reward.label is None]
    names = iter(distinct_names(unlabelled, (TOTAL, *given)))
    return [next(names) if reward.label is None else reward.label for reward in rewards]


class RefUpdateSection(Section):
    """A reference that moves to the policy: reference = (1 - rate) reference + rate policy."""

    rule: Literal["ema", "mixup", "bema"] = Field(
        default="ema",
        description="ema: a little after every optimizer step; mixup: in part, now and then "
        "(TR-DPO); bema: a moving average whose lag is corrected by how far the policy is from its "
        "start (BEMA), at a rate that falls by itself",
    )
    rate: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="share of the policy in a move; null = 0.05 for ema, 0.6 for mixup",
    )
    every: int | None = Field(
        default=None,
        ge=1,
        description="optimizer steps from move to move; null = 1 for ema, 512 for mixup, 400 for "
        "bema",
    )

    @field_validator("rule", mode="before")
    @classmethod
    def _no_rule_of_its_own(cls, value: Any) -> Any:  # Any: whatever YAML held
        if value == "refreshed":
            raise ValueError(
                "a reference that becomes the policy itself is `kl: {refresh_every: N}`, every N "
                "steps of the stage; write that in place of ref_update"
            )
        return value

    @model_validator(mode="after")
    def _rate_is_taken(self) -> RefUpdateSection:
        if self.rule == "bema" and self.rate is not None:
            raise ValueError("rule: bema has a rate that falls by itself; remove rate, or use ema")
        return self

    @property
    def resolved_rate(self) -> float:
        """The rate, with the rule's own where none is given."""
        own = 0.6 if self.rule == "mixup" else 0.05
        return own if self.rate is None else self.rate

    @property
    def resolved_every(self) -> int:
        """Optimizer steps from move to move, with the rule's own where none are given."""
        own = {"ema": 1, "mixup": 512, "bema": 400}[self.rule]
        return own if self.every is None else self.every


class KlSection(Section):
    """KL to the reference policy: the stage's input model, frozen, unless it moves."""

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
    ref_update: RefUpdateSection | None = Field(
        default=None,
        description="a reference that moves to the policy by optimizer steps; null = it is fixed",
    )

    @property
    def moves(self) -> bool:
        """Whether the reference is not always the stage's input model."""
        return self.refresh_every > 0 or self.ref_update is not None


class CriticSection(Section):
    """A value model next to the policy, for advantages that read `values`; its own optimizer."""

    init: Literal["policy", "reward_model", "checkpoint"] = Field(
        default="policy",
        description="policy: the stage's model with a new head; reward_model: the input "
        "`reward_model`, backbone and head; checkpoint: the directory `path`",
    )
    path: str | None = Field(default=None, description="directory of a saved critic")
    head: Literal["zero", "normal"] = Field(
        default="zero", description="a new head: zeros, or normal with variance 1/(hidden + 1)"
    )
    epochs: int = Field(default=1, ge=1, le=100_000, description="passes over each rollout batch")
    num_mini_batches: int = Field(default=1, ge=1, description="optimizer steps per pass")
    clip: float | None = Field(
        default=0.2, gt=0, description="bound on a value's move from the rollout's; null = off"
    )
    huber_delta: float | None = Field(
        default=None, gt=0, description="linear beyond this error; null = squared throughout"
    )
    aggregator: Component = Component(name="token-mean")
    optimizer: OptimizerField = OptimizerSection(learning_rate=1e-5)
    lora: LoraSection | None = Field(
        default=None, description="train a LoRA adapter, {} = rank 16; null = all weights"
    )
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


class ImplicitPrmSection(Section):
    """A process reward model trained along with the policy on its verdicts: a language model whose
    log-ratio to the stage's input model is the reward of a token (PRIME).
    """

    beta: float = Field(default=0.05, gt=0, le=1_000, description="factor of the log-ratio")
    epochs: int = Field(default=1, ge=1, le=100_000, description="passes over each rollout batch")
    num_mini_batches: int = Field(default=1, ge=1, description="optimizer steps per pass")
    optimizer: OptimizerField = OptimizerSection(learning_rate=1e-6)
    lora: LoraSection | None = Field(
        default=None, description="train a LoRA adapter, {} = rank 16; null = all weights"
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
        default=0.1,
        gt=0,
        le=1_000,
        description="k3 to the rollout's policy on a mini-batch, nats per token",
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
    power: float = Field(default=1.0, gt=0, le=1_000, description="of pow")


class RewardPoolSection(Section):
    """Worker processes for rewards that can hang or crash, and how many failures are too many."""

    workers: int = Field(
        default=0, ge=0, le=256, description="processes; 0 = one per core, at most 8"
    )
    timeout_s: float = Field(
        default=10.0,
        gt=0,
        le=86_400,
        description="seconds that one reward may take for one response",
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


class RlStage(StepStage):
    """Reinforcement learning: rollout, score, advantages, update, repeated. Reads `model`.

    With an input `dataset` the training problems are those of a `transform` stage.
    """

    reads = {"model": "model"}
    may_read = {"dataset": "dataset"}
    makes = "model"

    kind: Literal["rl"]
    algorithm: Component = Component(name="grpo")
    steps: int = Field(default=30, ge=1)
    prompts_per_step: int = Field(default=16, ge=1)
    num_generations: int = Field(
        default=8, ge=1, le=1_000_000, description="responses per prompt (group size)"
    )
    epochs: int = Field(default=1, ge=1, le=100_000, description="passes over each rollout batch")
    num_mini_batches: int = Field(
        default=1, ge=1, description="optimizer steps per pass; divides prompts_per_step"
    )
    micro_batch_size: int = Field(
        default=32, ge=1, description="sequences per forward and backward; memory only, never maths"
    )
    max_tokens_per_microbatch: int | None = Field(
        default=None,
        ge=1,
        description="tokens per forward and backward, each prompt counted once, in addition to "
        "micro_batch_size: micro-batches of about equal work where lengths differ",
    )
    skip_idle_rows: bool = Field(
        default=True,
        description="leave rows whose advantages are all 0 out of forward and backward where no "
        "other term reads them; the gradient is the same, metrics of tokens are of the other rows",
    )
    reuse_outputs: bool = Field(
        default=True,
        description="record the outputs of linear layers while responses are sampled, up to 2 GB, "
        "and reuse them in the first update; requires the engine transformers on a CPU and full "
        "weights, no LoRA",
    )
    max_staleness: int = Field(
        default=0,
        ge=0,
        le=1_000,
        description="updates that a rollout's policy may lie behind; from 1 on, the next rollouts "
        "are sampled while the update runs, and rollout_correction is tis_token unless it is set",
    )
    schedule: Literal["steps", "streaming"] = Field(
        default="steps",
        description="steps: the rollouts of a step are sampled together; streaming: responses are "
        "sampled without an end, weights change on the way, and a step takes the first groups that "
        "are done, no token of which is older than max_staleness",
    )
    stretch_tokens: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="with streaming: tokens of a response that are sampled before it goes on with "
        "the newest weights; null = 256",
    )
    generation: GenerationSection = GenerationSection()
    sampler: Component = Component(name="group")
    environment: EnvironmentComponent | None = Field(
        default=None, description="answers each turn of a response; null = one turn, no tools"
    )
    rewards: tuple[RewardComponent, ...] = Field(
        default=(RewardComponent(name="accuracy"),),
        description="summed; [] where nothing that is learned depends on rewards",
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
    advantage_transform: Components = Field(
        default=(), description="what changes the advantages afterwards, such as opd; in order"
    )
    policy_loss: LossTerms | None = Field(
        default=LossTermComponent(name="ppo_clip"),
        description="one term or several that are added; null = none, where `distillation` is all",
    )
    distillation: LossTermComponent | None = Field(
        default=None, description="a divergence from the teacher as a term of the loss, such as gkd"
    )
    teachers: dict[TeacherName, TeacherSection] = Field(
        default={},
        description="models to learn from, by name; the input `teacher` is one without being "
        "listed",
    )
    teacher_routing: RoutingSection | None = Field(
        default=None, description="which teacher judges which problem; needed for several"
    )
    teacher_missing: Literal["error", "mask"] = Field(
        default="error",
        description="a sampled token that its teacher did not score: stop, or learn nothing from "
        "the teacher there",
    )
    on_policy_share: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="probability that a step learns from what the policy samples; other steps are "
        "on the data's worked answers, one to each prompt, or on what `seq_kd` says",
    )
    seq_kd: bool = Field(
        default=False,
        description="with on_policy_share below 1: answers that the teacher samples, in place of "
        "the data's",
    )
    aggregator: Component = Component(name="seq-mean-token-mean")
    kl: KlSection = KlSection()
    entropy_coef: float = Field(default=0.0, ge=0, le=1_000, description="entropy bonus")
    entropy_aggregator: Component | None = Field(
        default=None, description="how the bonus is averaged; null = as `aggregator`"
    )
    entropy_controller: Component | None = Field(
        default=None,
        description="moves the bonus's coefficient after each optimizer step; null = entropy_coef",
    )
    top_entropy: float = Field(
        default=1.0, gt=0, le=1, description="share of tokens trained on, by entropy; 1 = all"
    )
    critic: CriticSection | None = Field(
        default=None, description="needed by advantages that read `values`, such as gae"
    )
    implicit_prm: ImplicitPrmSection | None = Field(
        default=None, description="needed by advantages that read `process_rewards`: prime"
    )
    ptx: PtxSection = PtxSection()
    rollout_correction: CorrectionSection = CorrectionSection()
    kl_guard: KlGuardSection | None = None
    optimizer: OptimizerField = OptimizerSection(learning_rate=5e-6)
    lora: LoraSection | None = Field(
        default=None, description="train a LoRA adapter, {} = rank 16; null = all weights"
    )
    evaluate_every: int = Field(default=10, ge=0, description="steps; 0 = never")
    sampled_evaluation: SampledEvaluationSection | None = Field(
        default=None,
        description="avg@k and pass@k of sampled answers while training, {} = 8 answers to 16 "
        "problems every 20 steps; null = never",
    )
    checkpoint_every: int = Field(
        default=0, ge=0, description="steps; 0 = by time alone, keep.checkpoint_minutes"
    )
    mismatch_alarm: float = Field(
        default=0.02,
        gt=0,
        le=1_000,
        description="warn when k3 between engine and trainer (nats) exceeds it",
    )

    token_weights: bool = Field(
        default=True,
        description="measure the gradient weights of tokens, token_weight/*, at each step",
    )
    check_sync: Literal["every", "first", "never"] = Field(
        default="every",
        description="which weight syncs are followed by a check that the engine has the trainer's "
        "weights; the run stops where it has not",
    )

    def outside_paths(self) -> dict[str, str]:
        """What its parts read in addition to their inputs, where the config names a file or
        folder.
        """
        critic_path = None if self.critic is None else self.critic.path
        named = {"ptx.path": self.ptx.path, "critic.path": critic_path}
        for index, reward in enumerate(self.rewards):
            path = reward.fields().get("path")
            named[f"rewards.{index}.path"] = None if path is None else str(path)
        for name, teacher in self.teachers.items():
            named[f"teachers.{name}.model"] = teacher.folder
        read = {} if self.environment is None else self.environment.paths()
        return read | {field: path for field, path in named.items() if path is not None}

    def needs_task(self) -> str:
        return "problems"

    def max_sequences(self) -> int:
        asked = 0 if self.sampled_evaluation is None else self.sampled_evaluation.k
        return max(asked, self.prompts_per_step * self.num_generations)

    @model_validator(mode="before")
    @classmethod
    def _input_is_a_teacher(cls, value: Any) -> Any:  # Any: whatever YAML held
        """The input `teacher` alone is the stage's only teacher."""
        if not isinstance(value, dict) or value.get("teachers"):
            return value
        inputs = value.get("inputs")
        if isinstance(inputs, dict) and TEACHER in inputs:
            return {**value, "teachers": {TEACHER: {}}}
        return value

    @property
    def learns_from_record(self) -> bool:
        """Whether rows with a teacher's scores were recorded before, and nothing is sampled."""
        return False

    def beyond_preset(self) -> dict[str, object]:
        """Fields that this stage sets over its preset's, and under those of the user."""
        return {}

    @property
    def teacher_roles(self) -> tuple[str, ...]:
        """The inputs that are teachers."""
        return tuple(name for name, teacher in self.teachers.items() if teacher.is_input)

    @property
    def transforms(self) -> tuple[Component, ...]:
        found = self.advantage_transform
        return found if isinstance(found, tuple) else (found,)

    @model_validator(mode="after")
    def _streams(self) -> RlStage:
        if self.schedule == "streaming" and self.max_staleness == 0:
            raise ValueError(
                "schedule: streaming samples while the policy is trained, so its samples are older "
                "than the policy; set max_staleness: 1 or more"
            )
        if self.schedule == "steps" and self.stretch_tokens is not None:
            raise ValueError(
                "stretch_tokens would change nothing without schedule: streaming; remove it"
            )
        return self

    @property
    def steps_ahead(self) -> int:
        """Steps whose rollouts are sampled, whole, while the policy is updated."""
        return self.max_staleness if self.schedule == "steps" else 0

    @field_validator("reward_clip")
    @classmethod
    def _low_below_high(
        cls, value: tuple[float | None, float | None]
    ) -> tuple[float | None, float | None]:
        low, high = value
        if low is not None and high is not None and low >= high:
            raise ValueError(
                f"must be [low, high] with low below high: {low:g} is not below {high:g}"
            )
        return value

    @property
    def complements(self) -> tuple[CoefSchedule, ...]:
        """Coefficients of which the other policy losses count the rest; one at most."""
        terms = [*self.loss_terms, *([] if self.distillation is None else [self.distillation])]
        coefs = [term.coef for term in terms]
        return tuple(c for c in coefs if isinstance(c, CoefSchedule) and c.complement)

    @property
    def loss_terms(self) -> tuple[LossTermComponent, ...]:
        terms = self.policy_loss
        if terms is None:
            return ()
        return terms if isinstance(terms, tuple) else (terms,)
