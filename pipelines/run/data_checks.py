"""What `validate` checks of texts: the model's chat template takes them, and they are not too long.

Only where model and data are on this disk. Importing this module loads transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.core.config.base import TASK_DATA, StageBase
from posttrain.core.config.resolve import ResolvedRun
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.config.schema import RunConfig
from posttrain.core.config.stages import (
    EvaluateStage,
    PreferenceDataStage,
    RewardModelStage,
    SftStage,
)
from posttrain.core.contracts import Task
from posttrain.core.contracts.preference_rows import Kind
from posttrain.core.data.lengths import LengthRule, fitting_prompts
from posttrain.core.data.preference import tokenise_labelled, tokenise_pairs
from posttrain.core.data.preference_files import read_preference_rows
from posttrain.core.data.row_task import check_worked, held_out_problems, training_problems
from posttrain.core.data.sft_rows import SourceReport, encoded_rows
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import DataError
from posttrain.core.models.source import known_folder
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.rollout.prompts import PromptEncoder
from posttrain.core.training.sft import fitting_worked
from posttrain.pipelines.stage.episodes import build_episodes
from posttrain.pipelines.stage.inputs import load_tokenizer

MOST = 10_000
"""Rows that are looked at for one stage."""


def check_texts(
    resolved: ResolvedRun, task: Task[Any], models: Path, manager: PluginManager
) -> list[str]:
    """A warning for each stage that would leave out or cut rows because of their length.

    `models` is where the bundled model is converted to. Raises `DataError` for what the stage would
    itself refuse before its first step.
    """
    config = resolved.config
    folder = known_folder(config.model, models)
    if folder is None:
        return []
    tokenizer = load_tokenizer(folder, config, manager)
    warnings = []
    for name in resolved.order:
        try:
            for rule in _checked(config, name, config.stages[name], task, tokenizer, manager):
                if warning := rule.check():
                    warnings.append(f"stages.{name}: {warning}")
        except DataError as error:
            raise DataError(f"stages.{name}: {error}") from error
    return warnings


def _checked(
    config: RunConfig,
    name: str,
    stage: StageBase,
    task: Task[Any],
    tokenizer: ChatTokenizer,
    manager: PluginManager,
) -> Iterator[LengthRule]:
    """The rules of a stage, applied to what it would read."""
    model, made = config.model, "dataset" in stage.inputs
    encoder: PromptEncoder = tokenizer
    if isinstance(stage, RlStage | EvaluateStage):
        encoder = build_episodes(manager, stage.environment, tokenizer) or tokenizer
    if isinstance(stage, SftStage) and stage.data is not None:
        yield from _supervised(config, name, stage, tokenizer)
    elif isinstance(stage, SftStage) and not made:
        count = min((stage.steps or 1) * (stage.batch_size or 1), MOST)
        problems = training_problems(task, count, config.seed, name)
        check_worked(task, problems)
        rule = LengthRule.of(model, "worked answers with their prompt")
        fitting_worked(tokenizer, problems, rule)
        yield rule
    elif isinstance(stage, PreferenceDataStage) and stage.data is not None:
        yield _preferences(config, name, stage, task, tokenizer)
    elif isinstance(stage, RlStage):
        if not made:
            count = min(stage.steps * stage.prompts_per_step, MOST)
            problems = training_problems(task, count, config.seed, name)
            rule = LengthRule.of(model, "prompts with their response")
            prompts = [(p, encoder.encode_prompt(p)) for p in problems]
            fitting_prompts(prompts, stage.generation.max_response_length, rule)
            yield rule
    elif isinstance(stage, EvaluateStage):
        section = stage.evaluation or config.evaluation
        rule = LengthRule.of(model, "held-out prompts with their response")
        held_out = held_out_problems(task, min(section.num_problems, MOST), config.seed)
        prompts = [(p, encoder.encode_prompt(p)) for p in held_out]
        fitting_prompts(prompts, section.max_response_length, rule)
        yield rule


def _supervised(
    config: RunConfig, name: str, stage: SftStage, tokenizer: ChatTokenizer
) -> Iterator[LengthRule]:
    """The first rows of each source and of the held-out file."""
    sources = {f"stages.{name}.data": [source.path for source in stage.data or ()]}
    sources[f"stages.{name}.held_out"] = [] if stage.held_out is None else [stage.held_out]
    for setting, paths in sources.items():
        for path in paths:
            rule = LengthRule.of(config.model, f"rows of {path}")
            report = SourceReport(path)
            for _ in encoded_rows(report, setting, tokenizer, stage.loss_on, rule, MOST):
                pass
            yield rule
            report.check()


def _preferences(
    config: RunConfig,
    name: str,
    stage: PreferenceDataStage,
    task: Task[Any],
    tokenizer: ChatTokenizer,
) -> LengthRule:
    kind: Kind = "pairs"
    if stage.data == TASK_DATA:
        rows = task.preferences()
    else:
        kinds: tuple[Kind, ...] = ("pairs", "labels")
        allowed = kinds[:1] if isinstance(stage, RewardModelStage) else kinds
        setting = f"stages.{name}.data"
        found = read_preference_rows(str(stage.data), setting, allowed, stage.pairs_from_scores)
        kind, rows = found.kind, found.rows
    rule = LengthRule.of(config.model, "rows", stage.max_length)
    tokenise = tokenise_pairs if kind == "pairs" else tokenise_labelled
    tokenise(rows[:MOST], tokenizer, rule)
    return rule
