"""Which stages of a run are already computed, and why the others are not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.core.artifacts import ArtifactStore, StageResult
from posttrain.core.config.base import BASE_MODEL
from posttrain.core.config.dag import makes
from posttrain.core.config.resolve import ResolvedRun
from posttrain.core.contracts import Task
from posttrain.core.identity import explain_difference, identity_of, outside_digests, stage_parts
from posttrain.core.models.loading import ModelRuntime
from posttrain.core.models.source import known_digest
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.runtime.device import choose_dtype
from posttrain.pipelines.engines import choose_engine


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Whether a stage would be reused, and why (not)."""

    name: str
    cached: bool
    reason: str


def parts_of_stage(
    resolved: ResolvedRun,
    name: str,
    input_digests: Mapping[str, str],
    engine: str,
    task_fingerprint: str,
) -> dict[str, str]:
    """The named parts of a stage's identity."""
    config = resolved.config.model_dump(mode="json")
    dtype = choose_dtype(resolved.config.model)  # what `auto` is here decides results
    config["model"]["dtype"] = str(dtype).removeprefix("torch.")
    plugins = [(use.kind, use.name, use.package, use.version) for use in resolved.plugins[name]]
    paths = resolved.config.stages[name].outside_paths()
    outside = outside_digests({f"stages.{name}.{field}": path for field, path in paths.items()})
    return stage_parts(
        config,
        config["stages"][name],
        input_digests,
        plugins,
        engine,
        task_fingerprint,
        {field: outside[f"stages.{name}.{field}"] for field in paths},
    )


def plan_stages(resolved: ResolvedRun, home: Path, manager: PluginManager) -> list[StagePlan]:
    """What `run` would do with each stage, in order. Reads only; a model is not downloaded."""
    store = ArtifactStore(home / "artifacts")
    config = resolved.config
    engine = choose_engine(config, manager, ModelRuntime.from_config(config.model))
    task: Task[Any] = manager.build(Task, config.task.name, config.task.fields())
    fingerprint = task.fingerprint()
    base = known_digest(config.model, home / "models")
    done: dict[str, StageResult] = {}
    plans: list[StagePlan] = []
    for name in resolved.order:
        stage = config.stages[name]
        digests: dict[str, str] = {}
        waits_for = ""
        for role, source in stage.inputs.items():
            if source == BASE_MODEL:
                digests[role] = base or ""
                waits_for = waits_for or ("" if base else "the base model is not here yet")
            elif source in done:
                digests[role] = done[source].artifact(makes(config.stages[source])).digest
            else:
                waits_for = waits_for or f"runs because '{source}' runs"
        if waits_for:
            plans.append(StagePlan(name, False, waits_for))
            continue
        parts = parts_of_stage(resolved, name, digests, engine, fingerprint)
        found, reason = store.lookup(name, identity_of(parts))
        if found is not None:
            done[name] = found
        elif reason == "never computed":
            reason = explain_difference(parts, store.previous_parts(name))
        plans.append(StagePlan(name, found is not None, reason))
    return plans
