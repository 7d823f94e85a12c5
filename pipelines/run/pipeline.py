"""A run in progress: its stages, each reused or computed.

All that surrounds a stage meets here (store, locks, gates, checkpoints, tracking, Prefect).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.core.cluster.group import RankLost
from posttrain.core.config.base import BASE_MODEL, StageBase
from posttrain.core.config.fork_section import StepStage
from posttrain.core.config.gate_stages import ApproveStage, PromoteStage
from posttrain.core.config.resolve import ResolvedRun, origins
from posttrain.core.config.schema import RegisterStage, RunConfig
from posttrain.core.contracts import Task
from posttrain.core.errors import ApprovalRefused, ResourceError
from posttrain.core.evaluation.accuracy import Evaluation
from posttrain.core.models.device import ModelRuntime
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.runtime.heap import release_memory
from posttrain.core.runtime.reporter import Reporter
from posttrain.core.store.approval import Answer, ApprovalNeeded, read_answer
from posttrain.core.store.artifacts import (
    Artifact,
    ArtifactStore,
    RunResult,
    StageResult,
    check_free_disk,
)
from posttrain.core.store.identity import identity_of
from posttrain.core.store.provenance import environment, with_plugins
from posttrain.core.store.run_record import RunRecorder
from posttrain.core.tracking.mlflow_run import FinalStatus, KnownModel
from posttrain.core.tracking.mlflow_stage import StageTracker
from posttrain.core.tracking.mlflow_tracker import PipelineTracker
from posttrain.core.tracking.writer import unreachable
from posttrain.core.training.checkpoint import read_step
from posttrain.core.training.step_record import StepRecorder
from posttrain.core.types import Problem
from posttrain.pipelines.run import flow_records
from posttrain.pipelines.run.forks import find_parent
from posttrain.pipelines.run.gates import Gates, check_passed
from posttrain.pipelines.run.planning import parts_of_stage, why_missed
from posttrain.pipelines.run.progress import Reporters
from posttrain.pipelines.run.stops import Stop, Watchdog, follows_a_stop, never
from posttrain.pipelines.run.storing import MODELS, StageWork, check_made, store_result
from posttrain.pipelines.run.summary import links
from posttrain.pipelines.stage.context import StageContext
from posttrain.pipelines.stage.engines import EnginePool
from posttrain.pipelines.stage.files import StageFiles, checkpoint_folder, kept_evidence
from posttrain.pipelines.stage.outside import champion_input, no_longer_true, outside_digests_of

MOST_LOSSES = 3
"""How often one stage goes on after ranks were lost, without a new checkpoint in between."""


def algorithms_of(config: RunConfig) -> str:
    """The algorithms of a run's stages, for its name in MLflow and its tags: `dpo grpo`."""
    found = (getattr(stage, "algorithm", None) for stage in config.stages.values())
    return " ".join(dict.fromkeys(each.shown for each in found if each is not None))


def origin_of(pipeline: Pipeline) -> str:
    """In Markdown, which run this one was forked from; empty if from none."""
    origin = pipeline.config.forked_from
    if origin is None:
        return ""
    at = f"before stage `{origin.stage}`"
    if origin.step is not None:
        at = f"after step {origin.step} of stage `{origin.stage}`"
    page = pipeline.page_of(origin.run)
    return f"Forked from run [{origin.run[:12]}]({page}) {at}."


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
    title: str
    record: RunRecorder
    no_cache: bool
    fresh: bool
    gates: Gates
    deployed: bool = False
    rows: tuple[Problem, ...] = ()
    rows_digest: str = ""
    results: dict[str, StageResult] = field(default_factory=dict)
    stop_requested: threading.Event = field(default_factory=threading.Event)
    stop_came: Callable[[], bool] = never
    evaluated: Callable[[str, int, Evaluation], None] = lambda stage, step, result: None
    watchdog: Watchdog = field(init=False)
    prefect_flow_run_id: str = ""
    warnings: list[str] = field(default_factory=list)
    closed: dict[str, ApprovalNeeded | ApprovalRefused] = field(default_factory=dict)

    def __post_init__(self) -> None:
        limit = 60.0 * self.config.limits.stall_minutes
        self.watchdog = Watchdog(limit, self.home / "runs")

    @property
    def config(self) -> RunConfig:
        """The resolved config."""
        return self.resolved.config

    def warn(self, text: str) -> None:
        """Show a warning now, and again in the run's summary; its record has it too."""
        self.warnings.append(text)
        self.record.warn(text)
        self.reporter.warn(text)

    def report_outages(self) -> None:
        """Say that MLflow or the store went away, or came back."""
        for sentence in (*self.tracker.news(), *self.store.news()):
            self.warn(sentence)

    def check(self) -> None:
        """Raise `Stop` once somebody asked to stop; called between pieces of work.

        A run from which no call comes for long is taken to hang.
        """
        self.watchdog.sign()
        self.report_outages()
        if self.stop_came():
            self.stop_requested.set()
        if self.stop_requested.is_set():
            raise Stop

    def joined_flow(self, flow_run_id: str) -> None:
        """Note which Prefect flow run this is, on the MLflow side too, and report to it."""
        self.prefect_flow_run_id = flow_run_id
        self.tracker.set_tags({"prefect.flow_run_id": flow_run_id})
        device = self.runtime.device.type
        tags = ["posttrain", self.config.name, f"seed:{self.config.seed}", f"device:{device}"]
        tags += [f"algorithm:{name}" for name in algorithms_of(self.config).split()]
        flow_records.tag_flow_run(flow_run_id, tags)
        reporters = [self.reporter, flow_records.FlowProgress()]
        if not self.deployed:  # whose own log has the lines
            reporters.append(flow_records.FlowLog(flow_run_id))
        self.reporter = Reporters(reporters)

    def announce(self, event: str, stage: str, payload: Mapping[str, Any]) -> None:
        """Tell Prefect's automations."""
        flow_records.announce(event, self.tracker.run_id, stage, payload)

    def result(self, seconds: float) -> RunResult:
        """The finished run."""
        return RunResult(
            run_id=self.tracker.run_id,
            status="completed",
            stages=self.real_results(),
            mlflow_uri=self.tracker.uri,
            mlflow_run_id=self.tracker.run_id,
            mlflow_experiment_id=self.tracker.experiment_id,
            prefect_flow_run_id=self.prefect_flow_run_id,
            home=self.home,
            seconds=seconds,
            warnings=tuple(self.warnings),
            baselines=self.baselines,
        )

    def page_of(self, run_id: str) -> str:
        """The page of another run of this config in MLflow."""
        other = replace(self.result(0.0), mlflow_run_id=run_id, prefect_flow_run_id="")
        return links(other)["mlflow"]

    @property
    def baselines(self) -> dict[str, str]:
        """The stage that each evaluation is compared with, where there is one."""
        inputs = {name: stage.inputs for name, stage in self.config.stages.items()}
        return {name: roles["baseline"] for name, roles in inputs.items() if "baseline" in roles}

    def real_results(self) -> dict[str, StageResult]:
        """The results in order, with MLflow's ids in the place of placeholders where known."""
        results = (self.results[name] for name in self.resolved.order if name in self.results)
        return {
            result.name: replace(
                result,
                mlflow_run_id=self.tracker.real(result.mlflow_run_id),
                artifacts=tuple(self._real(item) for item in result.artifacts),
            )
            for result in results
        }

    def _real(self, item: Artifact) -> Artifact:
        return replace(
            item,
            mlflow_run_id=self.tracker.real(item.mlflow_run_id),
            mlflow_model_id=self.tracker.real(item.mlflow_model_id),
        )

    def run_stage(
        self, name: str, upstream: Mapping[str, StageResult | None]
    ) -> StageResult | None:
        """Reuse the stage's result when its identity is known, else compute and store it.

        None for a gate that is closed, which `closed` then holds, and for all that is behind it.
        """
        self.check()
        reached = {source: made for source, made in upstream.items() if made is not None}
        if len(reached) < len(upstream):
            return None
        stage = self.config.stages[name]
        try:
            inputs, result = self._run_with_mlflow(name, stage, reached)
            check_passed(result)
        except (ApprovalNeeded, ApprovalRefused) as closed:
            self.closed[name] = closed
            return None
        finally:
            self.engines.stage_ended(name)
        if stage.passes_on:
            result = replace(result, artifacts=(*result.artifacts, inputs[stage.passes_on]))
        self.results[name] = result
        return result

    def _run_with_mlflow(
        self, name: str, stage: StageBase, upstream: Mapping[str, StageResult]
    ) -> tuple[dict[str, Artifact], StageResult]:
        """Run the stage; one that changes MLflow's registry waits for MLflow, and begins again.

        Such a stage can be done twice, and computes nothing long.
        """
        while True:
            if isinstance(stage, RegisterStage | PromoteStage):
                self._wait_for_mlflow(name)
            try:
                inputs = self._inputs(stage, upstream)
                return inputs, self._reuse_or_compute(name, stage, inputs)
            except ResourceError as error:
                if not isinstance(stage, RegisterStage | PromoteStage) or not unreachable(error):
                    raise

    def _wait_for_mlflow(self, name: str) -> None:
        reported = False
        while not self.tracker.answers():
            if not reported:
                self.warn(f"{name}: waits for MLflow, whose registry it changes; nothing is lost")
            reported = True
            for _ in range(10):
                self.check()
                time.sleep(0.2)

    def _reuse_or_compute(
        self, name: str, stage: StageBase, inputs: dict[str, Artifact]
    ) -> StageResult:
        digests = {role: artifact.digest for role, artifact in inputs.items()}
        digests |= outside_digests_of(stage, self.rows_digest)
        parts = parts_of_stage(
            self.resolved,
            name,
            digests,
            self.engines.name,
            self.task.fingerprint(),
            self.tracker.uri,
        )
        identity = identity_of(parts)
        self.record.stage(name, identity)
        files = StageFiles(
            checkpoint_folder(self.home, name, identity),
            self.config.keep,
            self.warn,
            self.store.mirror,
        )
        work = StageWork(name, stage, inputs, identity, parts, files)
        with self.store.computing(
            name, identity, waits=partial(self._wait, name), check=self.check
        ):
            # What a person said is never asked again because other stages are computed again.
            if not self.no_cache or isinstance(stage, ApproveStage):
                found, reason = self.store.lookup(name, identity)
                if found is not None and not self._outdated(name, found, inputs):
                    # Killed after the result was in place, a run leaves the checkpoints behind.
                    files.settle()
                    return self._reuse(found)
                if reason.startswith("damaged"):
                    self.warn(f"{name}: computed again, because its stored result is {reason}")
                else:
                    self._say_why(name, stage, parts)
            with self.watchdog.resting():
                answer = self.gates.answer(name, stage, inputs, identity)
            if self.fresh:
                files.forget()
            self._begin_fork(work)
            losses, newest = 0, files.resume_from()
            while True:
                try:
                    return self._compute(work, answer)
                except RankLost as lost:
                    reached, newest = newest, files.resume_from()
                    losses = 1 if newest != reached else losses + 1
                    if self.config.cluster is None or losses > MOST_LOSSES:
                        raise
                    self.warn(f"{name}: goes on from its last checkpoint, because {lost}")

    def _begin_fork(self, work: StageWork) -> None:
        """Give a forked stage the steps that it shares, unless it has gone on from them."""
        if not isinstance(work.stage, StepStage) or work.stage.fork is None:
            return
        from posttrain.pipelines.run.fork_start import ForkStart  # it imports every kind of stage

        start = ForkStart(
            config=self.config,
            work=work,
            home=self.home,
            store=self.store,
            reporter=self.reporter,
            warn=self.warn,
            check=self.check,
        )
        start.begin()

    def _share(self, stage: StageBase, tracker: StageTracker, newest: Path | None) -> bool:
        """Show in MLflow what a forked stage shares; whether it stands where it was forked."""
        if not isinstance(stage, StepStage) or stage.fork is None:
            return False
        from posttrain.pipelines.run.shared_tables import fork_tags, share_tables

        parent = find_parent(stage.fork, self.home)
        tracker.set_tags(fork_tags(parent.record.run_id, stage.fork.name, stage.fork.step))
        if not self.tracker.answers():
            self.warn("MLflow is away: the tables of the shared steps are in the forked run alone")
        elif problem := share_tables(self.tracker.uri, parent, tracker):
            self.warn(problem)
        return newest is not None and read_step(newest) == stage.fork.step

    def _outdated(self, name: str, found: StageResult, inputs: Mapping[str, Artifact]) -> bool:
        """Whether a person has decided otherwise since."""
        if found.kind == "approve":
            return self.gates.overrides(name, read_answer(found.artifact("approval").path))
        return no_longer_true(found, inputs)

    def _wait(self, name: str, holder: str) -> None:
        self.reporter.say(f"{name}: {holder} is computing it; waiting for its result")

    def _inputs(self, stage: StageBase, upstream: Mapping[str, StageResult]) -> dict[str, Artifact]:
        inputs = {}
        for role, source in stage.inputs.items():
            if source == BASE_MODEL:
                inputs[role] = self.base
            else:
                made = upstream[source].artifact(self.config.stages[source].makes)
                inputs[role] = self._real(made)
        if isinstance(stage, PromoteStage):
            inputs |= champion_input(self.tracker.uri, stage)
        return inputs

    def _say_why(self, name: str, stage: StageBase, parts: Mapping[str, str]) -> None:
        """In one line, why the stage runs although it did before."""
        reason = why_missed(self.store, name, stage, parts)
        if reason.changes:
            self.reporter.say(f"{name}: runs again, {reason}")

    def _reuse(self, found: StageResult) -> StageResult:
        models = [item for item in found.artifacts if item.kind in MODELS]
        run_id = self.tracker.cached_stage(
            found.name, found.kind, found.mlflow_run_id, found.metrics
        )
        # Another machine's MLflow may have made them: here they need entries of their own.
        known = [KnownModel(m.mlflow_model_id, m.uri, m.digest) for m in models]
        linked = self.tracker.known_models(run_id, found.name, known)
        ids = dict(zip((model.uri for model in models), linked, strict=True))
        artifacts = (
            replace(item, mlflow_model_id=ids.get(item.uri, item.mlflow_model_id))
            for item in found.artifacts
        )
        found = replace(found, artifacts=tuple(artifacts))
        self.reporter.stage_finished(found.name, "cached", 0.0, found.metrics)
        self._tell_listeners(found.name, "cached", found.metrics)
        return found

    def _compute(self, work: StageWork, answer: Answer | None) -> StageResult:
        began = time.perf_counter()
        name, stage, files = work.name, work.stage, work.files
        self.reporter.stage_reached(name)
        for place in (self.home, self.store.root):
            check_free_disk(place, 0.0, self.config.limits.min_free_gb, f"stage '{name}'")
        newest = files.resume_from()
        tracker = self.tracker.stage(
            name,
            stage.kind,
            stage.model_dump(mode="json"),
            identity=work.identity,
            resumed_step=None if newest is None else read_step(newest),
        )
        out = self.store.begin(name)
        begins = self._share(stage, tracker, newest)
        try:
            for artifact in work.inputs.values():
                if artifact.mlflow_model_id:
                    tracker.log_model_input(artifact.mlflow_model_id)
            recorder = self._recorder(name, files, newest) if stage.takes_steps else None
            context = self._context(work, out, tracker, answer, newest, recorder)
            with kept_evidence(files, newest, stage.kind) as evidence:
                output = self.manager.stage(stage).run(replace(context, evidence=evidence))
            check_made(name, stage, output, out)
            if begins:
                output = replace(output, resumed=False)  # what it shares was not interrupted
            files.hand_over(out)
            release_memory()
            result = store_result(self.store, work, output, out, tracker, began)
        except BaseException as error:  # Ctrl-C too: the run is ended and the error goes on
            stopped = self.stop_requested.is_set() or follows_a_stop(error)
            killed = stopped or not isinstance(error, Exception)
            status: FinalStatus = "KILLED" if killed else "FAILED"
            self.store.discard(out)
            tracker.finish(status)
            self.reporter.stage_finished(name, status.lower(), time.perf_counter() - began, {})
            self._tell_listeners(name, status.lower(), {})
            raise
        files.settle()
        tracker.finish("FINISHED")
        self.reporter.stage_finished(name, result.status, result.seconds, result.metrics)
        self._tell_listeners(name, result.status, result.metrics)
        return result

    def _recorder(self, name: str, files: StageFiles, found: Path | None) -> StepRecorder | None:
        runtime = self.runtime
        here = environment(runtime.device, runtime.dtype, self.engines.name)
        return files.recorder(found, with_plugins(here, origins(self.resolved.plugins[name])))

    def _context(
        self,
        work: StageWork,
        out: Path,
        tracker: StageTracker,
        answer: Answer | None = None,
        resume_from: Path | None = None,
        steps: StepRecorder | None = None,
    ) -> StageContext:
        return StageContext(
            run=self.config,
            name=work.name,
            stage=work.stage,
            inputs=work.inputs,
            out=out,
            checkpoints=work.files.root,
            resume_from=resume_from,
            steps=steps,
            manager=self.manager,
            task=self.task,
            runtime=self.runtime,
            engines=self.engines,
            tracker=tracker,
            mlflow_uri=self.tracker.uri,
            reporter=self.reporter,
            warn=self.warn,
            check=self.check,
            announce=lambda event, payload: self.announce(event, work.name, payload),
            answer=answer,
            rows=self.rows,
            run_id=self.record.folder.name,
            push=work.files.push,
            evaluated=partial(self.evaluated, work.name),
            store=self.store.root,
        )

    def _tell_listeners(self, name: str, status: str, metrics: Mapping[str, float]) -> None:
        self.manager.hooks.hook.posttrain_on_stage_end(
            stage=name, status=status, metrics=dict(metrics)
        )
