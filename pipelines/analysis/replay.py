"""`replay`: a stage's steps computed again, from a checkpoint or its input, as the run did."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from posttrain.core.config.fork_section import StepStage
from posttrain.core.config.resolve import origins
from posttrain.core.config.sections import KeepSection
from posttrain.core.errors import ConfigError, RunError
from posttrain.core.models.device import ModelRuntime, set_threads
from posttrain.core.models.quiet import quiet_libraries
from posttrain.core.rollout import episode_log
from posttrain.core.runtime.heap import keep_freed_memory
from posttrain.core.runtime.reporter import Reporter
from posttrain.core.store.artifacts import Artifact
from posttrain.core.store.provenance import differences, environment, with_plugins
from posttrain.core.tracking.sink import NotTracked
from posttrain.core.training.checkpoint import KEPT
from posttrain.core.training.step_record import StepSink
from posttrain.pipelines.analysis.past_run import PastRun
from posttrain.pipelines.analysis.replay_comparison import (
    ComparedStep,
    Comparison,
    Difference,
    Reached,
    StepSource,
    find_steps,
)
from posttrain.pipelines.run.again import ReplayContext, take_steps_again
from posttrain.pipelines.run.cluster import joined_cluster, on_this_machine
from posttrain.pipelines.run.forks import find_parent
from posttrain.pipelines.stage.engines import EnginePool
from posttrain.pipelines.stage.files import OWN_ANSWERS

CHANGED = "not as it was when the step was taken"
"""Begins the note of what of the machine, the code and the plugins is another."""


@dataclass
class ReplayResult:
    """How a replay ended; `from_step` is the step after which it began, 0 the stage's input."""

    run_id: str
    stage: str
    step: int
    from_step: int
    notes: list[str] = field(default_factory=list)
    steps: list[ComparedStep] = field(default_factory=list)

    @property
    def first_difference(self) -> Difference | None:
        """The first thing that differs, in the order of computing."""
        return next((d for step in self.steps for d in step.differences), None)

    @property
    def equal(self) -> bool:
        """Whether everything that was compared is what it was."""
        return self.first_difference is None

    def values(self) -> dict[str, object]:
        """The JSON."""
        first = self.first_difference
        return {
            "run_id": self.run_id,
            "stage": self.stage,
            "step": self.step,
            "from_step": self.from_step,
            "equal": self.equal,
            "first_difference": None if first is None else asdict(first),
            "notes": self.notes,
            "steps": [asdict(compared) for compared in self.steps],
        }


@dataclass
class Replay:
    """A replay of one step of a run; `notes` are what a reader of the result must know first."""

    run: PastRun
    reporter: Reporter
    notes: list[str] = field(default_factory=list)
    source: StepSource | None = None
    """The record of the stage whose step was asked for last."""

    def note(self, text: str) -> None:
        """Say it now, and with the result."""
        self.notes.append(text)
        self.reporter.warn(text)

    def step(self, step: int, stage: str | None = None) -> ReplayResult:
        """Compute `step` again and compare it with its record, as all recorded on the way to it.

        Raises `ConfigError` for a stage or step that the run does not have, `ResourceError` when
        what is needed was not kept. Writes into a temporary folder only.
        """
        config, name = self.run.resolved.config, self.run.training_stage(stage)
        self._refuse_shared(name, step)
        source = self.source = find_steps(self.run, name)
        source.check_step(step, config.keep.records)
        set_threads(config.limits.num_threads)
        keep_freed_memory()
        quiet_libraries()
        engines = EnginePool(config, self.run.manager, ModelRuntime.from_config(config.model))
        self._note_changes(source, step, engines)
        inputs = self.run.inputs(name)
        for role in source.changed_inputs(inputs):
            self.note(f"input {role} is not the one that the run read: its digest differs")
        begun, start = next(self.run.checkpoints(name, step, self.note), (0, None))
        result = ReplayResult(self.run.record.run_id, name, step, begun, self.notes)
        self.reporter.say(_beginning(result, start))
        comparison = Comparison(
            source.folder,
            source.recorded,
            step,
            source.weights_after,
            lambda compared: self.reporter.say(step_line(compared)),
            result.steps,
        )
        try:
            with tempfile.TemporaryDirectory(prefix="posttrain-replay-") as folder:
                _bring_samples(source, Path(folder))
                made = self._context(name, inputs, Path(folder), start, comparison, engines)
                joined = joined_cluster(made.run, Path(folder))
                with joined, closing(engines), suppress(Reached):
                    take_steps_again(made, step)
        finally:
            engines.close()
        if not result.steps or result.steps[-1].step != step:
            raise RunError(f"the stage ended before step {step}: its data or its config differ")
        return result

    def _refuse_shared(self, name: str, step: int) -> None:
        """Steps that a fork shares were taken by another run, with its settings."""
        section = self.run.resolved.config.stages[name]
        fork = section.fork if isinstance(section, StepStage) else None
        if fork is not None and step <= fork.step:
            whose = find_parent(fork, self.run.home).record.run_id[:12]
            raise ConfigError(
                f"--step {step}: the first {fork.step} steps of stage '{name}' are those of run "
                f"{whose}, which this run was forked from; replay them there: posttrain replay "
                f"{whose} --step {step} --stage {name}"
            )

    def _note_changes(self, source: StepSource, step: int, engines: EnginePool) -> None:
        """What else than the step itself could make a difference."""
        runtime, engine = engines.runtime, engines.name
        found = environment(runtime.device, runtime.dtype, engine)
        here = with_plugins(found, origins(self.run.resolved.plugins[source.stage]))
        changed = differences(source.recorded[step].environment, here)
        if changed:
            self.note(f"{CHANGED}: {'; '.join(changed)}")
        if not source.is_unchanged():
            self.note(f"the record {source.folder} was changed after the run")
        if engine != "transformers":
            self.note(f"the engine '{engine}' does not promise the same samples a second time")

    def _context(
        self,
        name: str,
        inputs: Mapping[str, Artifact],
        folder: Path,
        start: Path | None,
        steps: StepSink,
        engines: EnginePool,
    ) -> ReplayContext:
        there = self.run.stage_inputs(name, self.run.resolved, inputs)
        run = on_this_machine(there.run)
        return ReplayContext(
            run=run.model_copy(update={"keep": KeepSection(checkpoint_minutes=0)}),
            name=name,
            stage=there.stage.model_copy(update={"checkpoint_every": 0}),
            inputs=inputs,
            manager=there.manager,
            task=there.task,
            runtime=engines.runtime,
            check=there.check,
            out=folder / "out",
            checkpoints=folder,
            resume_from=start,
            steps=steps,
            engines=engines,
            tracker=NotTracked(),
            mlflow_uri="",
            reporter=self.reporter,
            warn=self.note,
        )


def step_line(compared: ComparedStep) -> str:
    """How a step compares, in a line."""
    much = f"{compared.tensors} tensors and {compared.metrics} metrics"
    if not compared.differences:
        return f"step {compared.step}: {much} are equal"
    first, more = compared.differences[0], len(compared.differences) - 1
    return f"differs, {first}" + (f"; {more} more of {much} differ" if more else "")


def _beginning(result: ReplayResult, start: Path | None) -> str:
    place = f"run {result.run_id[:12]}, stage {result.stage}, step {result.step}"
    if start is not None:
        return f"{place}: starts from the checkpoint after step {result.from_step} ({start})"
    hint = " (with keep.every a later run keeps nearer ones)" if result.step > 1 else ""
    return f"{place}: starts from what the stage read{hint}"


def _bring_samples(source: StepSource, folder: Path) -> None:
    """The run's own sampled answers and episodes that cannot be drawn a second time, if kept."""
    for place in (source.checkpoints, source.checkpoints / KEPT):
        if (place / OWN_ANSWERS).is_file():
            shutil.copy(place / OWN_ANSWERS, folder / OWN_ANSWERS)
    kept = source.folder.parent / episode_log.FOLDER
    if kept.is_dir():
        shutil.copytree(kept, folder / episode_log.FOLDER)
