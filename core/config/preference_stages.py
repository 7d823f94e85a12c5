"""Stages that learn from judged answers: reward models of answers and of steps, preferences."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from posttrain.core.config.base import TASK_DATA, Component, Section, one_or_many
from posttrain.core.config.fork_section import StepStage
from posttrain.core.config.sections import (
    GenerationSection,
    LoraSection,
    OptimizerField,
    OptimizerSection,
)
from posttrain.core.contracts.stage import FieldPlace

PAIR_PROMPTS_PER_CALL = 16
"""Problems that a stage samples answers to at once."""
PREFIXES_PER_CALL = 64
"""Beginnings of answers that are gone on from at once."""


class JudgedAnswersStage(StepStage):
    """What stages that learn from judged answers share: how their rows are cut and batched."""

    reads = {"model": "model"}
    sections = ("seed", "task", "engine", "model")

    generation: GenerationSection = GenerationSection()
    held_out_fraction: float = Field(
        default=0.2, gt=0, lt=1, description="of prompts, not of rows; never trained on"
    )
    max_length: int | None = Field(
        default=None,
        ge=2,
        description="tokens of prompt and answer together; model.overlong says what becomes of "
        "longer rows; null = model.max_model_len",
    )
    epochs: int = Field(default=1, ge=1, le=100_000, description="passes over the training rows")
    batch_size: int = Field(
        default=16, ge=1, description="pairs or single answers per optimizer step, at most"
    )
    micro_batch_size: int = Field(
        default=16, ge=1, description="of these per forward and backward; memory only, never maths"
    )
    lora: LoraSection | None = Field(
        default=None, description="train a LoRA adapter, {} = rank 16; null = all weights"
    )
    checkpoint_every: int = Field(
        default=0, ge=0, description="steps; 0 = by time alone, keep.checkpoint_minutes"
    )


class PreferenceDataStage(JudgedAnswersStage):
    """What stages that learn from preferences share: where these come from, and how they are cut.

    They come from a file or folder, from the task, or the model answers the task's problems and its
    right answers are paired with its wrong ones.
    """

    kind: Literal["reward_model", "preference"]
    data: str | None = Field(
        default=None,
        min_length=1,
        description="a file, folder or hub:owner/name@revision of pairs or labelled answers, text "
        "or messages, recognised by its columns; `task` = pairs that the task brings (gsm8k with "
        "`solutions`); null = the model's own answers",
    )
    pairs_from_scores: Literal["best_worst", "all"] = Field(
        default="best_worst",
        description="which answers of a prompt make pairs, in a file that gives each a score",
    )
    num_prompts: int = Field(
        default=64, ge=2, description="training problems sampled for pairs, when there is no file"
    )
    num_generations: int = Field(
        default=8, ge=2, le=1_000_000, description="answers sampled per problem"
    )
    pairs_per_prompt: int = Field(default=2, ge=1, description="at most, per problem")
    unfinished: Literal["as_judged", "rejected"] = Field(
        default="as_judged",
        description="what an own answer that the length limit cut is worth. as_judged: right if "
        "the verifier finds the answer in it; rejected: never right, so that what is trained "
        "learns that answers end",
    )

    def outside_paths(self) -> dict[str, str]:
        """The file of preferences; what a task brings is in the task's own digest, and a data set
        on the hub is named with its revision."""
        elsewhere = self.data in (None, TASK_DATA) or str(self.data).startswith("hub:")
        return {} if elsewhere else {"data": str(self.data)}

    def needs_task(self) -> str:
        needs = self.data in (None, TASK_DATA)
        return "problems, or a file of preferences as its `data`" if needs else ""

    def max_sequences(self) -> int:
        return PAIR_PROMPTS_PER_CALL * self.num_generations if self.data is None else 0


class RewardModelStage(PreferenceDataStage):
    """Bradley-Terry reward model on pairs of answers. Reads `model`."""

    makes = "reward_model"

    kind: Literal["reward_model"]
    preference_loss: Component = Component(name="bradley_terry")
    optimizer: OptimizerField = OptimizerSection()

    def components(self) -> Iterable[tuple[FieldPlace, str, Component]]:
        yield ("preference_loss",), "preference_loss", self.preference_loss


class ProcessRewardModelStage(JudgedAnswersStage):
    """A model that scores each step of an answer, from labelled steps or from own answers that are
    continued from every step. Reads `model`."""

    makes = "reward_model"

    kind: Literal["process_reward_model"]
    data: str | None = Field(
        default=None,
        min_length=1,
        description="a file, folder or hub:owner/name@revision of rows with `prompt`, "
        "`completions` (the steps) and `labels`; null = the model's own answers",
    )
    separator: str = Field(default="\n\n", min_length=1, description="the text that ends a step")
    num_prompts: int = Field(
        default=64, ge=2, description="training problems that are sampled, when there is no file"
    )
    num_generations: int = Field(
        default=4, ge=1, le=1_000_000, description="answers sampled per problem"
    )
    num_continuations: int = Field(
        default=8,
        ge=1,
        le=1_000_000,
        description="ways to go on that are sampled from each step; the share of right ones is "
        "the step's value",
    )
    estimate: Literal["share", "any"] = Field(
        default="share",
        description="label of a step: the share of right continuations, or 1 if one is right",
    )
    max_steps: int = Field(
        default=16, ge=1, le=10_000, description="steps of an answer that are continued, at most"
    )
    optimizer: OptimizerField = OptimizerSection()

    def outside_paths(self) -> dict[str, str]:
        """The file of labelled steps; a data set on the hub is named with its revision."""
        elsewhere = self.data is None or self.data.startswith("hub:")
        return {} if elsewhere else {"data": str(self.data)}

    def needs_task(self) -> str:
        return "problems, or a file of labelled steps as its `data`" if self.data is None else ""

    def max_sequences(self) -> int:
        if self.data is not None:
            return 0
        answers = PAIR_PROMPTS_PER_CALL * self.num_generations
        return max(answers, PREFIXES_PER_CALL * self.num_continuations)


class PreferenceComponent(Component):
    """A preference loss with its factor in the sum."""

    coef: float = Field(
        default=1.0,
        ge=-1_000,
        le=1_000,
        description="factor of this term in the loss; below 0 the opposite is learned",
    )


PreferenceTerms = Annotated[
    Annotated[PreferenceComponent, Tag("one")]
    | Annotated[tuple[PreferenceComponent, ...], Tag("many"), Field(min_length=1)],
    Discriminator(one_or_many),
]
"""One preference loss, or a list of them that are added."""


class OnlineSection(Section):
    """Pairs of the current policy's own answers, made again every few steps.

    A round samples answers with the policy as it is, ranks them, and pairs the best with the worst
    of each prompt; the next `refresh_every` steps train on these pairs.
    """

    steps: int = Field(default=100, ge=1, le=10_000_000, description="optimizer steps in all")
    refresh_every: int = Field(default=1, ge=1, description="steps trained on the pairs of a round")
    prompts_per_round: int = Field(default=16, ge=1, description="problems sampled in each round")
    num_generations: int = Field(
        default=4, ge=2, le=1_000_000, description="answers sampled per problem"
    )
    ranked_by: Literal["verifier", "reward_model"] = Field(
        default="verifier",
        description="what says which answer is better: the task's verifier, or the stage's input "
        "`reward_model`",
    )

    @property
    def rounds(self) -> int:
        return -(-self.steps // self.refresh_every)


class PreferenceStage(PreferenceDataStage):
    """Learning from preferences: DPO, IPO, KTO and their relatives. Reads `model`.

    The reference policy of losses that need one is the stage's input model, frozen. With `online`,
    pairs are made of the current policy's answers; ranked by a reward model, it reads
    `reward_model`.
    """

    makes = "model"

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
    online: OnlineSection | None = Field(
        default=None,
        description="make pairs of the current policy's answers as training goes on; null = the "
        "pairs are there before the first step",
    )
    optimizer: OptimizerField = OptimizerSection(learning_rate=5e-6)
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
        terms = self.preference_loss
        return terms if isinstance(terms, tuple) else (terms,)

    def max_sequences(self) -> int:
        if self.online is not None:
            return PAIR_PROMPTS_PER_CALL * self.online.num_generations
        return super().max_sequences()
