"""What a run will cost, told in figures: the model is looked up, this machine measured."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from posttrain.core.config.schema import RunConfig
from posttrain.core.costs.calibration import Calibration
from posttrain.core.costs.estimate import GB, Estimator, StageCost
from posttrain.core.costs.shape import find_model
from posttrain.core.models.runtime import ModelRuntime
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.runtime.device import set_threads
from posttrain.core.runtime.heap import keep_freed_memory
from posttrain.pipelines.engines import choose_engine, largest_request


@dataclass(frozen=True, slots=True)
class Costs:
    """`stages` has the figures of each stage to be run: seconds and GB; `total` their sums.

    `model` is one sentence on the model and how it is known. Without its size there is no more.
    """

    model: str
    stages: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    total: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def estimate_run(
    config: RunConfig, manager: PluginManager, home: Path, todo: Sequence[str]
) -> Costs:
    """Estimates of the stages in `todo`, which run in that order. Writes nothing."""
    known = find_model(config.model, home / "models")
    source = config.model.source
    if known is None:
        return Costs(f"{source}: its size is not known here, so there are no estimates")
    told = f"{source}: {known.shape.total / 1e6:,.1f} M parameters ({known.how})"
    if not todo:
        return Costs(told)
    set_threads(config.limits.num_threads)  # as the run does
    keep_freed_memory()
    engine = choose_engine(config, manager, ModelRuntime.from_config(config.model))
    estimator = Estimator.of(config, manager, known, engine, largest_request(config))
    costs = estimator.costs(todo)
    measured: dict[str, float] = {}
    rates = estimator.work.rates
    if isinstance(rates, Calibration):
        measured = {"seconds": round(rates.seconds, 2), **rates.told()}
    stages = {name: cost.row() for name, cost in costs.items()}
    return Costs(told, stages, _total(costs), measured, (*estimator.notes, *_busy()))


def _total(costs: Mapping[str, StageCost]) -> dict[str, float]:
    """Times and files add up; of memory and of passing files the largest counts."""
    left, most = 0.0, 0.0
    for cost in costs.values():
        left += cost.disk.left
        most = max(most, left + cost.disk.passing)
    return {
        "seconds": round(sum(c.time.total_s for c in costs.values() if c.time is not None), 2),
        "memory_gb": round(max(cost.memory.peak for cost in costs.values()) / GB, 3),
        "disk_gb": round(left / GB, 4),
        "disk_peak_gb": round(most / GB, 4),
    }


def _busy() -> tuple[str, ...]:
    """A warning when others use this machine while it is measured."""
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    if load <= cores + 0.5:
        return ()
    told = f"this machine is busy (load {load:.1f} on {cores} cores)"
    return (f"{told}: the times are of this moment, and shorter when it is quiet",)
