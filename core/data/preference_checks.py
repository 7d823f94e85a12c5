"""What `posttrain validate` says of the files of preferences that a run reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from posttrain.core.config.base import TASK_DATA
from posttrain.core.config.explaining import raise_problems
from posttrain.core.config.preference_stages import (
    PreferenceDataStage,
    PreferenceStage,
    RewardModelStage,
)
from posttrain.core.data.preference_files import EXAMPLES, PreferenceFile, read_preference_rows
from posttrain.core.errors import DataError

if TYPE_CHECKING:
    from posttrain.core.config.resolve import ResolvedRun
    from posttrain.core.plugin_manager import PluginManager


def check_files(resolved: ResolvedRun, manager: PluginManager) -> list[str]:
    """Notes on the files of preferences that the stages read.

    Raises `ConfigError` where a stage's loss reads another kind of rows, and `DataError` for files
    that cannot be used.
    """
    notes: list[str] = []
    problems: list[str] = []
    for name, stage in resolved.config.stages.items():
        if not isinstance(stage, PreferenceDataStage) or stage.data in (None, TASK_DATA):
            continue
        place = f"stages.{name}.data"
        setting = f"{place} ({resolved.loaded.where(place)})"
        found = read_preference_rows(
            str(stage.data), setting, ("pairs", "labels", "completions"), stage.pairs_from_scores
        )
        wrong = _wrong_kind(stage, found, manager)
        if wrong:
            problems.append(resolved.loaded.problem(place, wrong))
        elif len({row.key for row in found.rows}) < 2:
            raise DataError(
                f"{setting}: {stage.data} has answers to one prompt only, and some prompts are "
                "held out to measure on: add rows with other prompts"
            )
        notes += [f"stages.{name}: {line}" for line in found.notes()]
    raise_problems(problems)
    return notes


def _wrong_kind(stage: PreferenceDataStage, found: PreferenceFile, manager: PluginManager) -> str:
    """Why the stage's loss cannot read these rows, and what to change; empty if it can."""
    assert isinstance(stage, PreferenceStage | RewardModelStage)
    policy = isinstance(stage, PreferenceStage)
    leading = stage.loss_terms[0] if isinstance(stage, PreferenceStage) else stage.preference_loss
    entries: list[Any] = [*manager.entries("preference_loss")]  # Any: contracts import torch
    loss: Any = manager.find("preference_loss", leading.name).cls  # Any: as above
    wanted = loss.data
    if found.kind == wanted:
        return ""
    trained = "policy" if policy else "reward_model"
    fits = [
        entry.name
        for entry in entries
        if trained in entry.cls.trains and entry.cls.data == found.kind
    ]
    choose = f", or choose one of {fits}" if fits else ""
    return (
        f"'{leading.name}' reads {EXAMPLES[wanted]}, but {found.rows[0].where} is of the form "
        f"{EXAMPLES[found.kind]}; give another file{choose}"
    )
