"""What `validate` checks of texts: the model's chat template takes them, they are not too long, and
rewards can read the right answers.

Only where model and data are on this disk. Importing this module loads no model code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from posttrain.core.config.base import TASK_DATA, Component, StageBase
from posttrain.core.config.distill_stage import RecordTeacherStage
from posttrain.core.config.evaluation_stages import EvaluateStage
from posttrain.core.config.preference_stages import (
    PreferenceDataStage,
    ProcessRewardModelStage,
    RewardModelStage,
)
from posttrain.core.config.resolve import ResolvedRun
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.config.schema import RunConfig
from posttrain.core.config.sections import EnvironmentComponent
from posttrain.core.config.sft_stage import SftStage
from posttrain.core.contracts import Plugin, Reward, Task
from posttrain.core.contracts.preference_rows import Kind
from posttrain.core.data.lengths import LengthRule, fitting_prompts, fitting_worked
from posttrain.core.data.preference import tokenise_labelled, tokenise_pairs
from posttrain.core.data.preference_files import read_preference_rows
from posttrain.core.data.problem_sets import (
    check_worked,
    held_out_problems,
    read_examples,
    training_problems,
)
from posttrain.core.data.sft_rows import SourceReport, encoded_rows
from posttrain.core.data.steps import fitting_rows, read_labelled_steps
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import DataError
from posttrain.core.models.source import known_folder, unchecked
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.rewards.checking import unreadable_references
from posttrain.core.rewards.weighted import weighted_rewards
from posttrain.core.types import Problem
from posttrain.pipelines.run.teacher_checks import check_teachers
from posttrain.pipelines.stage.inputs import episodes_of, load_tokenizer

MOST = 10_000
"""Rows that are looked at for one stage."""

PluginT = TypeVar("PluginT", bound=Plugin[Any])


@dataclass(slots=True)
class TextChecks:
    """Warnings about texts, and notes on what could not be checked before the run."""

    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check_texts(
    resolved: ResolvedRun, manager: PluginManager, task: Task[Any], models: Path
) -> TextChecks:
    """Each stage's texts, as the stage itself will check them when it starts.

    `models` is where the bundled model is converted to. Raises `DataError` for what the stage would
    itself refuse before its first step.
    """
    config, found = resolved.config, TextChecks()
    folder = known_folder(config.model, models)
    tokenizer = None
    if folder is not None:
        tokenizer = load_tokenizer(folder, config, manager, light=True)
    elif not unchecked(config.model):
        found.notes.append(
            f"the run converts model {config.model.source} first: lengths are checked when each "
            "stage starts"
        )
    found.notes += check_teachers(config, folder, tokenizer, manager)
    encoded: dict[str, tuple[int, ...]] = {}
    for name in resolved.order:
        stage = _Stage(config, name, manager, task, encoded)
        try:
            if made := stage.made_by:
                found.notes.append(
                    f"stages.{name}: stage '{made}' makes its data: their lengths are checked "
                    f"when {name} starts"
                )
            warnings = [*stage.references()]
            if tokenizer is not None:
                warnings += [rule.check() for rule in stage.lengths(tokenizer)]
        except DataError as error:
            raise DataError(f"stages.{name}: {error}") from error
        found.warnings += [f"stages.{name}: {warning}" for warning in warnings if warning]
    return found


@dataclass(frozen=True, slots=True)
class _Stage:
    """A stage of the config, with what it would read; several ask the same prompts."""

    run: RunConfig
    name: str
    manager: PluginManager
    task: Task[Any]
    encoded: dict[str, tuple[int, ...]]
    """Token ids of prompts without an environment, by the keys of their problems."""

    @property
    def stage(self) -> StageBase:
        return self.run.stages[self.name]

    @property
    def made_by(self) -> str | None:
        """The stage that makes its data, if one does."""
        return self.stage.inputs.get("dataset")

    def build(self, contract: type[PluginT], component: Component) -> PluginT:
        """The plugin that a component of the config names."""
        return self.manager.build(contract, component.name, component.fields())

    def problems(self, count: int) -> list[Problem]:
        """The first training problems that the stage would take."""
        return training_problems(self.task, min(count, MOST), self.run.seed, self.name)

    def references(self) -> list[str]:
        """Warnings of rewards that cannot read some right answers."""
        stage = self.stage
        if not isinstance(stage, RlStage) or self.made_by is not None or stage.learns_from_record:
            return []
        rewards = weighted_rewards(stage.rewards, partial(self.build, Reward))
        if all(type(weighted.reward).unreadable is Reward.unreadable for weighted in rewards):
            return []
        problems = self.problems(stage.steps * stage.prompts_per_step)
        return unreadable_references(rewards, problems)

    def lengths(self, tokenizer: ChatTokenizer) -> Iterator[LengthRule]:
        """The rules of the stage, applied to what it would read."""
        stage, made = self.stage, self.made_by is not None
        if isinstance(stage, SftStage) and stage.data is not None:
            yield from self._supervised(tokenizer, stage)
        elif isinstance(stage, SftStage) and not made:
            problems = self.problems((stage.steps or 1) * (stage.batch_size or 1))
            check_worked(self.task, problems)
            yield self._worked(tokenizer, problems, "worked answers with their prompt")
        elif isinstance(stage, PreferenceDataStage) and stage.data is not None:
            yield self._preferences(tokenizer, stage)
        elif isinstance(stage, PreferenceDataStage) and not made:
            longest = stage.generation.max_response_length
            yield self._prompts(tokenizer, None, self.problems(stage.num_prompts), longest)
        elif isinstance(stage, ProcessRewardModelStage) and stage.data is not None:
            yield self._steps(tokenizer, stage, stage.data)
        elif isinstance(stage, ProcessRewardModelStage):
            longest = stage.generation.max_response_length
            yield self._prompts(tokenizer, None, self.problems(stage.num_prompts), longest)
        elif isinstance(stage, RecordTeacherStage) and not made:
            longest = stage.generation.max_response_length
            yield self._prompts(tokenizer, None, self.problems(stage.num_problems), longest)
        elif isinstance(stage, RlStage):
            if not made and not stage.learns_from_record:
                problems = self.problems(stage.steps * stage.prompts_per_step)
                longest = stage.generation.max_response_length
                yield self._prompts(tokenizer, stage.environment, problems, longest)
            yield self._held_out(tokenizer, stage)
            if stage.ptx.path is not None:
                examples = read_examples(stage.ptx.path, f"stages.{self.name}.ptx.path")
                yield self._worked(tokenizer, examples[:MOST], "examples of the term ptx")
        elif isinstance(stage, EvaluateStage):
            yield self._held_out(tokenizer, stage)

    def _worked(self, tokenizer: ChatTokenizer, problems: list[Problem], what: str) -> LengthRule:
        rule = LengthRule.of(self.run.model, what)
        fitting_worked(tokenizer, problems, rule)
        return rule

    def _held_out(self, tokenizer: ChatTokenizer, stage: EvaluateStage | RlStage) -> LengthRule:
        own = stage.evaluation if isinstance(stage, EvaluateStage) else None
        section = own or self.run.evaluation
        problems = held_out_problems(self.task, min(section.num_problems, MOST), self.run.seed)
        return self._prompts(
            tokenizer, stage.environment, problems, section.max_response_length, "held-out prompts"
        )

    def _prompts(
        self,
        tokenizer: ChatTokenizer,
        environment: EnvironmentComponent | None,
        problems: list[Problem],
        longest: int,
        what: str = "prompts",
    ) -> LengthRule:
        """The prompts as the model is given them, an environment's instructions included."""
        rule = LengthRule.of(self.run.model, f"{what} with their response")
        with episodes_of(self, environment, tokenizer) as episodes:
            encoder = episodes or tokenizer
            known = self.encoded if episodes is None else {}
            for problem in problems:
                if problem.key not in known:
                    known[problem.key] = encoder.encode_prompt(problem)
        prompts = [(problem, known[problem.key]) for problem in problems]
        fitting_prompts(prompts, longest, rule)
        return rule

    def _supervised(self, tokenizer: ChatTokenizer, stage: SftStage) -> Iterator[LengthRule]:
        """The first rows of each source and of the held-out file."""
        sources = {"data": [source.path for source in stage.data or ()]}
        sources["held_out"] = [] if stage.held_out is None else [stage.held_out]
        for field_name, paths in sources.items():
            for path in paths:
                rule = LengthRule.of(self.run.model, f"rows of {path}")
                report, setting = SourceReport(path), f"stages.{self.name}.{field_name}"
                for _ in encoded_rows(report, setting, tokenizer, stage.loss_on, rule, MOST):
                    pass
                yield rule
                report.check()

    def _preferences(self, tokenizer: ChatTokenizer, stage: PreferenceDataStage) -> LengthRule:
        kind: Kind = "pairs"
        if stage.data == TASK_DATA:
            rows = self.task.preferences()
        else:
            kinds: tuple[Kind, ...] = ("pairs", "labels")
            allowed = kinds[:1] if isinstance(stage, RewardModelStage) else kinds
            place = f"stages.{self.name}.data"
            found = read_preference_rows(str(stage.data), place, allowed, stage.pairs_from_scores)
            kind, rows = found.kind, found.rows
        rule = LengthRule.of(self.run.model, "rows", stage.max_length)
        tokenise = tokenise_pairs if kind == "pairs" else tokenise_labelled
        tokenise(rows[:MOST], tokenizer, rule)
        return rule

    def _steps(
        self, tokenizer: ChatTokenizer, stage: ProcessRewardModelStage, data: str
    ) -> LengthRule:
        rule = LengthRule.of(self.run.model, "answers with steps", stage.max_length)
        rows = read_labelled_steps(data, f"stages.{self.name}.data", stage.separator)
        fitting_rows([row.tokenised(stage.separator, tokenizer) for row in rows[:MOST]], rule)
        return rule
