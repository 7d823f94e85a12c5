"""One pipeline run: everything the flow's tasks share, and how a stage is run or reused."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from posttrain.core.artifacts import (
    Artifact,
    ArtifactStore,
    StageResult,
    check_free_disk,
    combine_digests,
    digests_below,
    tree_digests,
)
from posttrain.core.config.base import BASE_MODEL, StageBase
from posttrain.core.config.dag import makes
from posttrain.core.config.resolve import ResolvedRun
from posttrain.core.config.schema import RunConfig
from posttrain.core.contracts import Task
from posttrain.core.identity import identity_of
from posttrain.core.models.loading import ModelRuntime
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.runtime.device import release_memory
from posttrain.core.runtime.report import Reporter
from posttrain.core.tracking.mlflow_stage import FinalStatus, StageTracker
from posttrain.core.tracking.mlflow_tracker import PipelineTracker
from posttrain.core.training.checkpoint import newest_checkpoint, read_step
from posttrain.pipelines.engines import EnginePool
from posttrain.pipelines.planning import parts_of_stage
from posttrain.pipelines.stages.context import StageContext, StageOutput
from posttrain.pipelines.stages.evaluate import run_evaluate
from posttrain.pipelines.stages.preference import run_preference
from posttrain.pipelines.stages.register import run_register
from posttrain.pipelines.stages.reward_model import run_reward_model
from posttrain.pipelines.stages.rl import run_rl
from posttrain.pipelines.stages.sft import run_sft
from posttrain.pipelines.stages.transform import run_transform
from posttrain.pipelines.stops import follows_a_stop

STAGE_RUNNERS: dict[str, Callable[[StageContext], StageOutput]] = {
    "evaluate": run_evaluate,
    "sft": run_sft,
    "reward_model": run_reward_model,
    "preference": run_preference,
    "rl": run_rl,
    "register": run_register,
    "transform": run_transform,
}


class Stop(KeyboardInterrupt):
    """Raised at the next safe point after somebody asked the run to stop."""


@dataclass
class Pipeline:
    """Shared by all stages of a run; `results` fills as they finish."""

    resolved: ResolvedRun
    home: Path
    manager: PluginManager
    task: Task[Any]
    runtime: ModelRuntime
    engines: EnginePool
    store: ArtifactStore
    tracker: PipelineTracker
    reporter: Reporter
    base: Artifact
    no_cache: bool
    fresh: bool
    results: dict[str, StageResult] = field(default_factory=dict)
    stop_requested: threading.Event = field(default_factory=threading.Event)
    prefect_flow_run_id: str = ""
    warnings: list[str] = field(default_factory=list)

    @property
    def config(self) -> RunConfig:
        """The resolved config."""
        return self.resolved.config

    def warn(self, text: str) -> None:
        """Show a warning now, and again in the run's summary."""
        self.warnings.append(text)
        self.reporter.warn(text)

    def check(self) -> None:
        """Raise `Stop` once somebody asked to stop; called between pieces of work."""
        if self.stop_requested.is_set():
            raise Stop

    def joined_flow(self, flow_run_id: str) -> None:
        """Note which Prefect flow run this is, on the MLflow side too."""
        self.prefect_flow_run_id = flow_run_id
        self.tracker.set_tags({"prefect.flow_run_id": flow_run_id})

    def run_stage(self, name: str, upstream: Mapping[str, StageResult]) -> StageResult:
        """Reuse the stage's result when its identity is known, else compute and store it."""
        self.check()
        stage = self.config.stages[name]
        inputs = self._inputs(stage, upstream)
        digests = {role: artifact.digest for role, artifact in inputs.items()}
        parts = parts_of_stage(
            self.resolved, name, digests, self.engines.name, self.task.fingerprint()
        )
        identity = identity_of(parts)
        if not self.no_cache:
            found, reason = self.store.lookup(name, identity)
            if found is not None:
                return self._reuse(found)
            if reason.startswith("damaged"):
                self.warn(f"{name}: computed again, because its stored result is {reason}")
        result = self._compute(name, stage, inputs, identity, parts)
        self.results[name] = result
        return result

    def _inputs(self, stage: StageBase, upstream: Mapping[str, StageResult]) -> dict[str, Artifact]:
        inputs = {}
        for role, source in stage.inputs.items():
            if source == BASE_MODEL:
                inputs[role] = self.base
            else:
                inputs[role] = upstream[source].artifact(makes(self.config.stages[source]))
        return inputs

    def _reuse(self, found: StageResult) -> StageResult:
        # The models keep pointing at the run that made them, so the new run's id is not needed.
        self.tracker.cached_stage(found.name, found.kind, found.mlflow_run_id, found.metrics)
        self.results[found.name] = found
        self.reporter.stage_finished(found.name, "cached", 0.0, found.metrics)
        self._tell_listeners(found.name, "cached", found.metrics)
        return found

    def _compute(
        self,
        name: str,
        stage: StageBase,
        inputs: Mapping[str, Artifact],
        identity: str,
        parts: dict[str, str],
    ) -> StageResult:
        began = time.perf_counter()
        kind = str(getattr(stage, "kind"))  # noqa: B009 - declared by each stage class
        check_free_disk(self.home, 0.0, self.config.limits.min_free_gb, f"stage '{name}'")
        checkpoints = self.home / "checkpoints" / f"{name}-{identity[:16]}"
        if self.fresh:
            shutil.rmtree(checkpoints, ignore_errors=True)
        newest = newest_checkpoint(checkpoints)
        tracker = self.tracker.stage(
            name,
            kind,
            stage.model_dump(mode="json"),
            resumed_step=None if newest is None else read_step(newest),
        )
        partial = self.store.begin(name)
        try:
            for artifact in inputs.values():
                if artifact.mlflow_model_id:
                    tracker.log_model_input(artifact.mlflow_model_id)
            context = self._context(name, stage, inputs, partial, checkpoints, tracker)
            output = STAGE_RUNNERS[kind](context)
            release_memory()
            result = self._store(
                name, kind, output, inputs, identity, parts, partial, tracker, began
            )
        except BaseException as error:  # Ctrl-C too: the run is ended and the error goes on
            stopped = self.stop_requested.is_set() or follows_a_stop(error)
            killed = stopped or not isinstance(error, Exception)
            status: FinalStatus = "KILLED" if killed else "FAILED"
            self.store.discard(partial)
            tracker.finish(status)
            self.reporter.stage_finished(name, status.lower(), time.perf_counter() - began, {})
            self._tell_listeners(name, status.lower(), {})
            raise
        shutil.rmtree(checkpoints, ignore_errors=True)
        tracker.finish("FINISHED")
        self.reporter.stage_finished(name, result.status, result.seconds, result.metrics)
        self._tell_listeners(name, result.status, result.metrics)
        return result

    def _context(
        self,
        name: str,
        stage: StageBase,
        inputs: Mapping[str, Artifact],
        out: Path,
        checkpoints: Path,
        tracker: StageTracker,
    ) -> StageContext:
        return StageContext(
            run=self.config,
            name=name,
            stage=stage,
            inputs=inputs,
            out=out,
            checkpoints=checkpoints,
            manager=self.manager,
            task=self.task,
            runtime=self.runtime,
            engines=self.engines,
            tracker=tracker,
            mlflow_uri=self.tracker.uri,
            reporter=self.reporter,
            warn=self.warn,
            check=self.check,
        )

    def _store(
        self,
        name: str,
        kind: str,
        output: StageOutput,
        inputs: Mapping[str, Artifact],
        identity: str,
        parts: dict[str, str],
        partial: Path,
        tracker: StageTracker,
        began: float,
    ) -> StageResult:
        """Digest what was made, link it in MLflow, move it to its final place."""
        final = self.store.folder(name, identity)
        files = tree_digests(partial)
        artifacts = []
        for made_kind, path in output.made.items():
            relative = path.relative_to(partial).as_posix()
            digest = combine_digests(digests_below(files, relative))
            uri = str(final / relative)
            model_id = ""
            if made_kind in ("model", "reward_model"):
                model_id = tracker.log_model_output(name=name, uri=uri, digest=digest, step=0)
            artifacts.append(
                Artifact(
                    kind=made_kind,
                    uri=str(path),
                    digest=digest,
                    stage=name,
                    parents=tuple(artifact.digest for artifact in inputs.values()),
                    mlflow_run_id=tracker.run_id,
                    mlflow_model_id=model_id,
                )
            )
        result = StageResult(
            name=name,
            kind=kind,
            status="resumed" if output.resumed else "ran",
            artifacts=tuple(artifacts),
            metrics=dict(output.metrics),
            seconds=time.perf_counter() - began,
            mlflow_run_id=tracker.run_id,
        )
        folder = self.store.commit(partial, result, identity, parts, files)
        moved = tuple(
            replace(item, uri=str(folder / Path(item.uri).relative_to(partial)))
            for item in result.artifacts
        )
        return replace(result, artifacts=moved)

    def _tell_listeners(self, name: str, status: str, metrics: Mapping[str, float]) -> None:
        self.manager.hooks.hook.posttrain_on_stage_end(
            stage=name, status=status, metrics=dict(metrics)
        )
