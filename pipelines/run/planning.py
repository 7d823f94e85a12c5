"""Which stages of a run are already computed, and why the others are not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from posttrain.core.config.base import BASE_MODEL, StageBase
from posttrain.core.config.gate_stages import ApproveStage, PromoteStage
from posttrain.core.config.resolve import ResolvedRun, origins
from posttrain.core.contracts import Task
from posttrain.core.models.device import ModelRuntime, choose_dtype
from posttrain.core.models.source import known_digest
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.redaction import address, redacted_tree
from posttrain.core.store.approval import Answer, read_answer
from posttrain.core.store.artifacts import NEVER, Artifact, ArtifactStore, StageResult
from posttrain.core.store.identity import Reason, explain, identity_of, outside_digests, stage_parts
from posttrain.pipelines.run.model_reference import run_tracking_uri, tracking_uri
from posttrain.pipelines.stage.engines import choose_engine
from posttrain.pipelines.stage.outside import champion_input, no_longer_true, outside_digests_of


@dataclass(frozen=True, slots=True)
class StagePlan:
    name: str
    cached: bool
    reason: Reason


def parts_of_stage(
    resolved: ResolvedRun,
    name: str,
    input_digests: Mapping[str, str],
    engine: str,
    task_fingerprint: str,
    registry: str = "",
) -> dict[str, str]:
    """What a stage's identity is the hash of; `registry` is where MLflow's data are."""
    config = redacted_tree(resolved.config.model_dump(mode="json"))
    dtype = choose_dtype(resolved.config.model)  # what `auto` is here decides results
    config["model"]["dtype"] = str(dtype).removeprefix("torch.")
    if isinstance(resolved.config.stages[name], PromoteStage):  # it measures as that stage does
        measured = config["stages"][resolved.config.stages[name].inputs["evaluation"]]
        config["stages"][name]["measured_as"] = {
            key: measured[key] for key in ("evaluation", "environment")
        }
    plugins = origins(resolved.plugins[name])
    stage = resolved.config.stages[name]
    paths = stage.outside_paths()
    outside = outside_digests({f"stages.{name}.{field}": path for field, path in paths.items()})
    parts = stage_parts(
        config,
        config["stages"][name],
        type(stage),
        input_digests,
        plugins,
        engine,
        task_fingerprint if stage.reads_task_data() else "",
        {field: outside[f"stages.{name}.{field}"] for field in paths},
    )
    if registry and config["stages"][name]["kind"] == "register":
        parts["mlflow"] = json.dumps(
            address(registry)
        )  # what is registered on one server is not on another
    return parts


def why_missed(
    store: ArtifactStore,
    name: str,
    stage: StageBase,
    parts: Mapping[str, str],
    waits_for: Sequence[str] = (),
) -> Reason:
    """What of a stage differs from its earlier results; inputs in `waits_for` are yet to come."""
    return explain(name, parts, store.previous_parts(name), stage.inputs, waits_for)


def plan_stages(
    resolved: ResolvedRun,
    home: Path,
    manager: PluginManager,
    store: Path | None = None,
    rows_digest: str = "",
) -> list[StagePlan]:
    """What `run` would do with each stage, in order. Reads only; a model is not downloaded."""
    return _plan(resolved, home, manager, ArtifactStore(store or home / "artifacts"), rows_digest)


def _plan(
    resolved: ResolvedRun,
    home: Path,
    manager: PluginManager,
    store: ArtifactStore,
    rows_digest: str,
) -> list[StagePlan]:
    config = resolved.config
    engine = choose_engine(config, manager, ModelRuntime.from_config(config.model))
    task: Task[Any] = manager.task(config.task)
    fingerprint = task.fingerprint()
    base = known_digest(config.model, home / "models")
    uri, registry = tracking_uri(home), run_tracking_uri(home)
    done: dict[str, StageResult] = {}
    plans: list[StagePlan] = []
    for name in resolved.order:
        stage = config.stages[name]
        inputs, waits_for = _planned_inputs(stage, resolved, done, base)
        if isinstance(stage, PromoteStage) and uri is not None:
            inputs |= champion_input(uri, stage)
        digests = {role: artifact.digest for role, artifact in inputs.items()}
        digests |= outside_digests_of(stage, rows_digest)
        parts = parts_of_stage(resolved, name, digests, engine, fingerprint, registry)
        if waits_for:
            plans.append(StagePlan(name, False, _until(store, name, stage, parts, waits_for)))
            continue
        # What a gate was answered is read below; other stages are fetched by the run.
        is_gate = isinstance(stage, ApproveStage)
        found, reported = store.lookup(name, identity_of(parts), fetch=is_gate)
        reason = Reason(reported)
        if found is not None and no_longer_true(found, inputs):
            found, reason = None, Reason("its promotion was taken back")
        elif found is not None:
            answer = _answer(found)
            if answer is not None and not answer.approved:
                plans.append(StagePlan(name, True, Reason(answer.described())))
                continue
            passed = (inputs[stage.passes_on],) if stage.passes_on else ()
            done[name] = replace(found, artifacts=(*found.artifacts, *passed))
        elif isinstance(stage, ApproveStage):
            reason = Reason("this model was not approved yet")
        elif reported == NEVER:
            reason = why_missed(store, name, stage, parts)
        plans.append(StagePlan(name, found is not None, reason))
    return plans


def _planned_inputs(
    stage: StageBase, resolved: ResolvedRun, done: Mapping[str, StageResult], base: str | None
) -> tuple[dict[str, Artifact], list[str]]:
    """The inputs that exist already, and the roles of those that do not."""
    inputs: dict[str, Artifact] = {}
    waits_for: list[str] = []
    for role, source in stage.inputs.items():
        if source == BASE_MODEL and base is not None:
            inputs[role] = Artifact(kind="model", uri="", digest=base, stage=BASE_MODEL)
        elif source in done:
            inputs[role] = done[source].artifact(resolved.config.stages[source].makes)
        else:
            waits_for.append(role)
    return inputs, waits_for


def _answer(found: StageResult) -> Answer | None:
    return read_answer(found.artifact("approval").path) if found.kind == "approve" else None


def _until(
    store: ArtifactStore,
    name: str,
    stage: StageBase,
    parts: Mapping[str, str],
    waits_for: Sequence[str],
) -> Reason:
    """Of a stage whose inputs are not all there."""
    if any(stage.inputs[role] == BASE_MODEL for role in waits_for):
        return Reason("the base model is not here yet")
    return why_missed(store, name, stage, parts, waits_for)
