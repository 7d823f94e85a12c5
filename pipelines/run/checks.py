"""What a run begins with: its folders, its config, and a check of model, engine and data.

Nothing here writes, and importing it loads nothing heavy.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.core.errors import ResourceError

if TYPE_CHECKING:
    from posttrain.core.config.resolve import ResolvedRun
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


def check_inputs(resolved: ResolvedRun, manager: PluginManager) -> Inputs:
    """Model source, engine and task can be used.

    Raises `ResourceError` for a model directory without weights, an engine that cannot run here or
    a package that an optimizer needs, and `DataError` for missing, empty or malformed data.
    """
    from posttrain.core.contracts import RolloutEngine, Task
    from posttrain.core.models.source import check_source

    config = resolved.config
    check_source(config.model)
    check_optimizers(resolved)
    if not isinstance(config.engine, str):
        engine = manager.find("rollout_engine", config.engine.name).cls
        assert issubclass(engine, RolloutEngine)
        reason = engine.unavailable_reason()
        if reason is not None:
            raise ResourceError(f"engine '{config.engine.name}' cannot run here: {reason}")
    task: Task[Any] = manager.build(Task, config.task.name, config.task.fields())
    return Inputs({split: task.problems(split, 1, config.seed)[0] for split in SPLITS})


# Weights (bytes) that are loaded to check what a model computes; larger ones are checked at load.
MOST_CHECKED = 2 * 2**30


def check_model(resolved: ResolvedRun, manager: PluginManager) -> list[str]:
    """Compare our passes with the model's own forward pass, where its directory is here.

    Returns what is computed in a slower way and why, and that a model was not checked. Raises
    `ResourceError` for a model that cannot be used.
    """
    config = resolved.config
    path = Path(config.model.source).expanduser()
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    if not path.is_dir() or size > MOST_CHECKED:
        where = "it is large" if path.is_dir() else "it is not a directory here"
        return [f"model {config.model.source} is checked when the run loads it: {where}"]
    from posttrain.core.models.device import ModelRuntime
    from posttrain.core.models.loading import load_policy
    from posttrain.core.models.paths import paths_of
    from posttrain.core.training.agreement import check_passes
    from posttrain.pipelines.stage.engines import EnginePool

    runtime = ModelRuntime.from_config(config.model)
    model = load_policy(path, runtime)
    check_passes(model)
    notes = list(paths_of(model).notes)
    del model
    pool = EnginePool(config, manager, runtime)
    if pool.name == "transformers":
        with pool.lease(path) as engine:
            notes += paths_of(getattr(engine, "model", None)).notes
        pool.close()
    return notes


def check_optimizers(resolved: ResolvedRun) -> None:
    """Moments of 8 bits need a package that a plain install does not have."""
    from posttrain.core.training.compact_adamw import why_missing

    for name, stage in resolved.config.stages.items():
        for place, holder in ((name, stage), (f"{name}.critic", getattr(stage, "critic", None))):
            section = getattr(holder, "optimizer", None)
            reason = why_missing() if section is not None and section.moments == "8bit" else None
            if reason is not None:
                raise ResourceError(f"stages.{place}: {reason}")
