"""Every stage of the YAML except `rl`: supervised, preference, evaluation, and gates."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from posttrain.core.config.base import TASK_DATA, Component, Section, StageBase, one_or_many
from posttrain.core.config.sections import (
    EnvironmentComponent,
    EvaluationSection,
    GenerationSection,
    LoraSection,
    OptimizerField,
    OptimizerSection,
    RegistryAlias,
    RegistryName,
)
from posttrain.core.config.suites import installed_version_file, parse_suite
from posttrain.core.contracts.stage import FieldPlace

PAIR_PROMPTS_PER_CALL = 16
"""Problems that a stage samples answers to at once, to make pairs of them."""


class EvaluateStage(StageBase):
    """Greedy and sampled accuracy on held-out problems, with 95 % intervals. Reads `model`."""

    reads = {"model": "model"}
    may_read = {"baseline": "evaluation"}
    makes = "evaluation"
    repeatable = True

    kind: Literal["evaluate"]
    evaluation: EvaluationSection | None = Field(
        default=None, description="null = the run's own `evaluation` section"
    )
    environment: EnvironmentComponent | None = Field(
        default=None, description="answers in several turns, as in the rl stage that has it"
    )

    def outside_paths(self) -> dict[str, str]:
        return {} if self.environment is None else self.environment.paths()

    def needs_task(self) -> str:
        return "problems"

    def max_sequences(self) -> int:
        return 0 if self.evaluation is None else self.evaluation.batch_size


class BenchmarkStage(StageBase):
    """Measures `model` by benchmark suites of lm-eval or inspect-ai. Makes a `report`."""

    reads = {"model": "model"}
    makes = "report"
    repeatable = True

    kind: Literal["benchmark"]
    suites: tuple[str, ...] = Field(
        min_length=1,
        description="lm_eval:TASK[,TASK], inspect:FILE.py[@TASK] or held_out",
        examples=[["held_out"]],
    )
    tasks_dir: str | None = Field(
        default=None, min_length=1, description="folder with tasks of lm-eval as YAML files"
    )
    limit: int | None = Field(
        default=None, ge=1, description="samples of each task; null = all there are"
    )
    fewshot: int | None = Field(
        default=None,
        ge=0,
        description="examples in each prompt of lm-eval; null = the task's own",
    )
    chat_template: bool | None = Field(
        default=None,
        description="whether prompts of lm-eval go into the chat template; null = where the "
        "tokenizer has one",
    )
    batch_size: int = Field(default=16, ge=1, description="sequences computed together")
    max_tokens: int = Field(
        default=256, ge=1, description="of a response, where the benchmark says nothing"
    )
    download: bool = Field(default=False, description="let tasks fetch their data from a hub")

    @field_validator("suites")
    @classmethod
    def _are_suites(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        for text in texts:
            parse_suite(text)
        return texts

    def outside_paths(self) -> dict[str, str]:
        """The folder of tasks; files of tasks with the files next to them that may hold data; the
        file that says which version of the harness is installed.
        """
        found = {} if self.tasks_dir is None else {"tasks_dir": self.tasks_dir}
        for index, text in enumerate(self.suites):
            suite = parse_suite(text)
            version = installed_version_file(suite.harness)
            if version is not None:
                found[f"version of {suite.harness}"] = str(version)
            if suite.file:
                found[f"suites.{index}"] = suite.file
                for path in sorted(Path(suite.file).expanduser().parent.glob("*")):
                    if path.suffix in BESIDE and path.is_file() and path.name != suite.file:
                        found[f"suites.{index} {path.name}"] = str(path)
        return found

    def needs_task(self) -> str:
        return "problems" if "held_out" in self.suites else ""

    def reads_task_data(self) -> bool:
        return "held_out" in self.suites

    def max_sequences(self) -> int:
        return self.batch_size


BESIDE = (".py", ".json", ".jsonl", ".csv", ".parquet", ".yaml", ".txt")
"""Files next to a file of tasks on which its results may depend."""

HUB = "hub:"
"""How sources of data that are on the hub begin: `hub:owner/name/subset@revision#split`."""


class DataSource(Section):
    """One source of training data: a path by itself, or with its share of the rows."""

    path: str = Field(
        min_length=1,
        description="file, folder of files, or hub:owner/name[/subset][@revision][#split]",
    )
    weight: float | None = Field(
        default=None,
        gt=0,
        le=1_000_000,
        description="share of the rows, relative to the other sources; null = by number of rows",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:  # Any: whatever YAML held
        return {"path": value} if isinstance(value, str) else value


class EarlyStopping(Section):
    """When training ends before its last step, by the held-out loss."""

    patience: int = Field(
        default=3, ge=1, le=1_000_000, description="evaluations in a row without an improvement"
    )
    min_improvement: float = Field(
        default=0.0, ge=0, description="nats per token; a smaller decrease is not an improvement"
    )


class SftStage(StageBase):
    """Supervised fine-tuning on conversations, texts or worked answers. Reads `model`.

    Exactly one of `steps` and `epochs` is set, and one of `batch_size` and `max_tokens_per_batch`;
    setting the second of a pair turns the first one's default off.
    """

    reads = {"model": "model"}
    may_read = {"dataset": "dataset"}
    makes = "model"
    sections = ("seed", "task", "model")
    takes_steps = True

    kind: Literal["sft"]
    data: tuple[DataSource, ...] | None = Field(
        default=None,
        min_length=1,
        description="file, folder, hub:owner/name, or a list of these, each as {path, weight}; "
        "the format is recognised by the columns (docs/sft-data.md); null = the task's worked "
        "answers",
    )
    loss_on: Literal["assistant", "last_assistant", "all"] = Field(
        default="assistant",
        description="tokens that are learned: of all assistant messages, of the last one, or all; "
        "never those of messages with train: false",
    )
    weighting: Literal["none", "dft", "phi"] = Field(
        default="none",
        description="weigh each token's loss by its probability p (dft, arXiv:2508.05629) or by "
        "p (1 - p) (phi, arXiv:2508.11408)",
    )
    steps: int | None = Field(default=10, ge=1, description="optimizer steps")
    epochs: int | None = Field(
        default=None, ge=1, le=100_000, description="passes over the data; instead of steps"
    )
    batch_size: int | None = Field(default=32, ge=1, description="rows per optimizer step, at most")
    max_tokens_per_batch: int | None = Field(
        default=None,
        ge=1,
        description="rows are put together up to this many tokens per optimizer step; instead of "
        "batch_size. A longer row is a batch by itself",
    )
    micro_batch_size: int = Field(default=32, ge=1)
    held_out_fraction: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="of the conversations by their prompt; never trained on",
    )
    held_out: str | None = Field(
        default=None, min_length=1, description="file or folder; instead of held_out_fraction"
    )
    evaluate_every: int = Field(
        default=0,
        ge=0,
        description="steps between measurements of the held-out loss; 0 = before the first step "
        "and after the last",
    )
    early_stopping: EarlyStopping | None = Field(
        default=None, description="{} = after 3 evaluations without an improvement; null = never"
    )
    keep_best: bool = Field(
        default=False, description="the model of the evaluation with the lowest held-out loss"
    )
    optimizer: OptimizerField = OptimizerSection()
    lora: LoraSection | None = Field(
        default=None, description="train a LoRA adapter, {} = rank 16; null = all weights"
    )
    checkpoint_every: int = Field(
        default=0, ge=0, description="steps; 0 = by time alone, keep.checkpoint_minutes"
    )

    @model_validator(mode="before")
    @classmethod
    def _instead(cls, value: Any) -> Any:  # Any: whatever YAML held
        """Without `steps` where `epochs` are given, and so for the batch."""
        if not isinstance(value, dict):
            return value
        for usual, other in (("steps", "epochs"), ("batch_size", "max_tokens_per_batch")):
            if value.get(other) is not None:
                if value.get(usual) is not None:
                    raise ValueError(f"{usual} and {other} exclude each other; remove one of them")
                value = {**value, usual: None}
            elif usual in value and value[usual] is None:
                raise ValueError(f"neither {usual} nor {other} is set; set one of them")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> SftStage:
        if self.held_out is not None and self.held_out_fraction:
            raise ValueError(
                "held_out and held_out_fraction exclude each other; remove one of them"
            )
        weights = [source.weight for source in self.data or ()]
        if None in weights and any(weights):
            raise ValueError(
                "some sources of data have a weight and others have none; give each one a weight, "
                "or none of them"
            )
        if self.data is not None and "dataset" in self.inputs:
            raise ValueError(
                "data and inputs.dataset both say what is learned from; remove one of them"
            )
        for name in ("early_stopping", "keep_best"):
            if getattr(self, name) not in (None, False) and not self.evaluate_every:
                raise ValueError(f"{name} needs evaluate_every, such as 50 steps; set it")
        if self.evaluate_every and not self.measures:
            raise ValueError(
                "evaluate_every needs held-out rows; set held_out_fraction, such as 0.05, or "
                "held_out"
            )
        return self

    @property
    def measures(self) -> bool:
        """Whether there are held-out rows."""
        return self.held_out is not None or self.held_out_fraction > 0

    def outside_paths(self) -> dict[str, str]:
        """Files and folders of data. A data set on the hub is known by its name and revision."""
        given = {f"data.{i}.path": source.path for i, source in enumerate(self.data or ())}
        if self.held_out is not None:
            given["held_out"] = self.held_out
        return {field: path for field, path in given.items() if not path.startswith(HUB)}

    def needs_task(self) -> str:
        return "problems, or a file as its `data`" if self.data is None else ""

    def reads_task_data(self) -> bool:
        return self.data is None and "dataset" not in self.inputs


class PreferenceDataStage(StageBase):
    """What stages that learn from preferences share: where these come from, and how they are cut.

    They come from a file or folder, from the task, or the model answers the task's problems and its
    right answers are paired with its wrong ones.
    """

    reads = {"model": "model"}
    sections = ("seed", "task", "engine", "model")
    takes_steps = True

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
    generation: GenerationSection = GenerationSection()
    held_out_fraction: float = Field(
        default=0.2, gt=0, lt=1, description="of prompts, not of pairs; never trained on"
    )
    max_length: int | None = Field(
        default=None,
        ge=2,
        description="tokens of prompt and answer together; model.overlong says what becomes of "
        "longer rows; null = model.max_model_len",
    )
    epochs: int = Field(default=1, ge=1, le=100_000, description="passes over the training rows")
    batch_size: int = Field(
        default=16, ge=1, description="pairs or labelled rows per optimizer step, at most"
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


class ProcessRewardModelStage(StageBase):
    """A model that scores each step of an answer, from labelled steps or from own answers that are
    continued from every step. Reads `model`."""

    reads = {"model": "model"}
    makes = "reward_model"
    sections = ("seed", "task", "engine", "model")
    takes_steps = True

    kind: Literal["process_reward_model"]
    data: str | None = Field(
        default=None,
        min_length=1,
        description="a file, folder or hub:owner/name@revision of rows with `prompt`, "
        "`completions` (the steps) and `labels`; null = the model's own answers",
    )
    separator: str = Field(default="\n\n", min_length=1, description="the text that ends a step")
    num_prompts: int = Field(
        default=64, ge=2, description="training problems to answer, when there is no file"
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
    generation: GenerationSection = GenerationSection()
    held_out_fraction: float = Field(
        default=0.2, gt=0, lt=1, description="of prompts, not of answers; never trained on"
    )
    max_length: int | None = Field(
        default=None,
        ge=2,
        description="tokens of prompt and answer together; model.overlong says what becomes of "
        "longer rows; null = model.max_model_len",
    )
    epochs: int = Field(default=1, ge=1, le=100_000, description="passes over the training rows")
    batch_size: int = Field(default=16, ge=1, description="answers per optimizer step, at most")
    micro_batch_size: int = Field(
        default=16, ge=1, description="of these per forward and backward; memory only, never maths"
    )
    optimizer: OptimizerField = OptimizerSection()
    lora: LoraSection | None = Field(
        default=None, description="train a LoRA adapter, {} = rank 16; null = all weights"
    )
    checkpoint_every: int = Field(
        default=0, ge=0, description="steps; 0 = by time alone, keep.checkpoint_minutes"
    )

    def outside_paths(self) -> dict[str, str]:
        """The file of labelled steps; a data set on the hub is named with its revision."""
        elsewhere = self.data is None or self.data.startswith("hub:")
        return {} if elsewhere else {"data": str(self.data)}

    def needs_task(self) -> str:
        return "problems, or a file of labelled steps as its `data`" if self.data is None else ""

    def max_sequences(self) -> int:
        if self.data is not None:
            return 0
        steps = self.num_generations * self.max_steps * self.num_continuations
        return PAIR_PROMPTS_PER_CALL * min(steps, 64)


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
