"""What a run begins with: its folders, its config, and a check of model, engine and data.

Nothing here writes, and importing it loads nothing heavy.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.core.errors import ConfigError, ResourceError

if TYPE_CHECKING:
    from posttrain.core.config.resolve import ResolvedRun
    from posttrain.core.contracts import Task
    from posttrain.core.plugin_manager import PluginManager
    from posttrain.core.types import Problem, Split


STORE_VARIABLE = "POSTTRAIN_STORE"
SPLITS: tuple[Split, Split] = ("train", "held_out")


def shared_store() -> Path | None:
    """The store that the environment names, for runs that no command line starts."""
    named = os.environ.get(STORE_VARIABLE)
    return Path(named) if named else None


def folders(home: Path, store: Path | None) -> tuple[Path, Path]:
    """Home and store as absolute paths; the store is the home's own unless another is named."""
    home = home.expanduser().resolve()
    return home, (home / "artifacts" if store is None else store.expanduser().resolve())


def resolve_configs(
    configs: Sequence[Path], overrides: Sequence[str] | None
) -> tuple[ResolvedRun, PluginManager]:
    """Load and resolve; YAML mistakes show before the slow import of the plugins."""
    from posttrain.core.config.loading import load_config
    from posttrain.core.config.resolve import resolve

    loaded = load_config(configs, overrides or [])
    from posttrain.core.plugin_manager import PluginManager

    manager = PluginManager()
    return resolve(loaded, manager), manager


@dataclass(frozen=True, slots=True)
class Inputs:
    """One problem of each split, as proof that the task can supply them."""

    problems: dict[str, Problem]
    notes: tuple[str, ...] = ()
    """What was not checked, and what is probably a mistake."""


def check_inputs(resolved: ResolvedRun, manager: PluginManager) -> Inputs:
    """Model source, engine and task can be used.

    Raises `ResourceError` for a model directory without weights, an engine that cannot run here or
    a package that an optimizer needs, and `DataError` for missing, empty or malformed data.
    """
    from posttrain.core.contracts import RolloutEngine, Task
    from posttrain.core.models.device import ModelRuntime
    from posttrain.core.models.source import check_source, unchecked

    config = resolved.config
    check_source(config.model)
    ModelRuntime.from_config(config.model)
    check_training(resolved)
    if not isinstance(config.engine, str):
        engine = manager.find("rollout_engine", config.engine.name).cls
        assert issubclass(engine, RolloutEngine)
        reason = engine.unavailable_reason()
        if reason is not None:
            raise ResourceError(f"engine '{config.engine.name}' cannot run here: {reason}")
    task: Task[Any] = manager.build(Task, config.task.name, config.task.fields())
    problems: dict[str, Problem] = {
        split: task.problems(split, 1, config.seed)[0] for split in SPLITS
    }
    check_examples(resolved, task, problems["train"])
    not_checked = unchecked(config.model)
    return Inputs(problems, (*([not_checked] if not_checked else ()), *resolved.notes))


def check_examples(resolved: ResolvedRun, task: Task[Any], problem: Problem) -> None:
    """Worked answers for stages that imitate them, pairs that the task brings, the texts of
    `ptx.path`, and keys of judges."""
    from posttrain.core.config.base import TASK_DATA
    from posttrain.core.config.rl_stage import RlStage
    from posttrain.core.config.stages import PreferenceDataStage, SftStage
    from posttrain.core.data.row_task import check_worked, read_examples
    from posttrain.core.rewards.judge import api_key

    for name, stage in resolved.config.stages.items():
        if isinstance(stage, SftStage) and "dataset" not in stage.inputs:
            check_worked(task, [problem])
        if isinstance(stage, PreferenceDataStage) and stage.data == TASK_DATA:
            task.preferences()
        if isinstance(stage, RlStage) and stage.ptx.path is not None:
            read_examples(stage.ptx.path, f"stages.{name}.ptx.path")
        for reward in stage.rewards if isinstance(stage, RlStage) else ():
            key = reward.fields().get("api_key_env")
            api_key(None if key is None else str(key))


def check_training(resolved: ResolvedRun) -> None:
    """Packages and precisions that optimizers need, and layers that LoRA names."""
    import torch

    from posttrain.core.models.device import choose_dtype
    from posttrain.core.models.lora import check_targets
    from posttrain.core.training.compact_adamw import why_missing

    model = resolved.config.model
    folder = Path(model.source).expanduser()
    for name, stage in resolved.config.stages.items():
        for place, holder in ((name, stage), (f"{name}.critic", getattr(stage, "critic", None))):
            section = getattr(holder, "optimizer", None)
            reason = why_missing() if section is not None and section.moments == "8bit" else None
            if reason is not None:
                raise ResourceError(f"stages.{place}: {reason}")
            stochastic = section is not None and section.rounding == "stochastic"
            if stochastic and choose_dtype(model) != torch.bfloat16:
                raise ConfigError(
                    f"stages.{place}.optimizer.rounding: stochastic is for bfloat16 weights, and "
                    f"model.dtype '{model.dtype}' is float32 on this machine; set model.dtype: "
                    "bfloat16, or rounding: masters"
                )
            lora = getattr(holder, "lora", None)
            if lora is not None and lora.targets != "all" and folder.is_dir():
                check_targets(folder, lora.targets)
