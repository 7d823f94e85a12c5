"""What is checked before a run costs anything: model, engine, data. Writes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from posttrain.core.errors import ResourceError

if TYPE_CHECKING:
    from posttrain.core.config.resolve import ResolvedRun
    from posttrain.core.plugin_manager import PluginManager
    from posttrain.core.types import Problem, Split

SPLITS: tuple[Split, Split] = ("train", "held_out")


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


def check_optimizers(resolved: ResolvedRun) -> None:
    """Moments of 8 bits need a package that a plain install does not have."""
    from posttrain.core.training.eight_bit import why_missing

    for name, stage in resolved.config.stages.items():
        for place, holder in ((name, stage), (f"{name}.critic", getattr(stage, "critic", None))):
            section = getattr(holder, "optimizer", None)
            reason = why_missing() if section is not None and section.moments == "8bit" else None
            if reason is not None:
                raise ResourceError(f"stages.{place}: {reason}")
