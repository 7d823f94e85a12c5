"""What a forked stage begins with: the checkpoint, the records and the metrics that it shares.

They are put where an interrupted run of the stage would have left its own, so that everything else
goes on as after an interruption.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.core.analysis import evidence
from posttrain.core.config.base import Component
from posttrain.core.config.fork_section import StepStage
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.config.schema import RunConfig
from posttrain.core.config.sections import KeepSection
from posttrain.core.contracts import Task
from posttrain.core.errors import ConfigError, ResourceError
from posttrain.core.models.device import ModelRuntime
from posttrain.core.rollout import episode_log
from posttrain.core.runtime.files import link_or_copy, write_text
from posttrain.core.runtime.reporter import Reporter
from posttrain.core.store.artifacts import ArtifactStore
from posttrain.core.store.identity import flat, identity_of
from posttrain.core.store.manifests import read_manifest
from posttrain.core.tracking.journal import JournalRow, journal_path, read_journal
from posttrain.core.tracking.mlflow_run import measured, now_ms
from posttrain.core.tracking.sink import NotTracked
from posttrain.core.training import step_record
from posttrain.core.training.checkpoint import (
    KEPT,
    Checkpoints,
    DamagedCheckpoint,
    check_whole,
    complete_checkpoints,
    copy_checkpoint,
    history_of,
    optimizers_in,
    step_folder,
    step_of,
)
from posttrain.core.training.step_record import StepTensors, read_record, record_of
from posttrain.pipelines.run.again import ReplayContext, take_steps_again
from posttrain.pipelines.run.checks import resolve_configs
from posttrain.pipelines.run.cluster import on_this_machine
from posttrain.pipelines.run.forks import (
    Parent,
    check_settings,
    find_parent,
    nearest_checkpoint,
)
from posttrain.pipelines.run.past_inputs import inputs_read
from posttrain.pipelines.run.storing import StageWork
from posttrain.pipelines.stage.engines import EnginePool
from posttrain.pipelines.stage.files import OWN_ANSWERS, checkpoint_folder

BETWEEN = ".between-"
"""How the folder begins in which steps between a checkpoint and a fork are computed again."""


@dataclass
class ForkStart:
    """Gives a stage of a run what it shares, into the folder of its checkpoints."""

    config: RunConfig
    work: StageWork
    home: Path
    store: ArtifactStore
    reporter: Reporter
    warn: Callable[[str], None]
    check: Callable[[], None]
    parent: Parent = field(init=False)

    def __post_init__(self) -> None:
        assert self.stage.fork is not None
        self.parent = find_parent(self.stage.fork, self.home)

    @property
    def stage(self) -> StepStage:
        """The forked stage's config."""
        assert isinstance(self.work.stage, StepStage)
        return self.work.stage

    @property
    def root(self) -> Path:
        """The folder of its checkpoints."""
        return self.work.files.root

    def begin(self) -> None:
        """Bring everything, the checkpoint last; nothing if the stage has begun already."""
        if complete_checkpoints(self.root):
            return
        fork, parent = self.parent.fork, self.parent
        check_settings(self.work.name, self.config, parent)
        self._check_model()
        self.root.mkdir(parents=True, exist_ok=True)
        own = step_folder(self.root / KEPT, fork.step)
        source = own if _is_whole(own) else self._checkpoint()
        self._bring_records()
        self._bring_metrics(source)
        if source != own:
            before, now = parent.stage, self.stage
            leave = [place for place in optimizers_in(source) if not _needs(place, now)]
            own.parent.mkdir(exist_ok=True)
            try:
                copy_checkpoint(
                    source, own, change=lambda p: carried(p, before, now), without=leave
                )
            except FileNotFoundError as error:  # its run goes on, and keeps newer ones instead
                raise ResourceError(
                    f"{parent.shown} has just removed its checkpoint after step {fork.step}, for "
                    "newer ones: set keep.every there, or fork at a later step"
                ) from error
        copy_checkpoint(own, step_folder(self.root, fork.step))
        self.reporter.say(
            f"{self.work.name}: its first {fork.step} steps are those of run "
            f"{parent.record.run_id[:12]}, and are not computed again"
        )

    # -- what is checked once the inputs are there ---------------------------------------------

    def _check_model(self) -> None:
        """The model that the shared steps began with is the one that this stage reads."""
        known = self._known_digest("model")
        here = self.work.inputs["model"].digest
        if known is not None and known != here:
            raise ConfigError(
                f"stages.{self.work.name}: reads another model than {self.parent.shown} did "
                f"(sha256 {here[:12]}, then {known[:12]}), so it cannot go on from "
                "its steps: what makes the model was changed; start a run of its own with "
                "`posttrain run`"
            )

    def _known_digest(self, role: str) -> str | None:
        """The digest of what the parent read, where that is known."""
        fork = self.parent.fork
        manifest = read_manifest(self.store.fetched(fork.name, fork.identity))
        if manifest is not None:
            found: str | None = manifest["parts"].get(f"input {role}")
            return found
        source = self.parent.stage.inputs.get(role, "")
        identity = self.parent.record.stages.get(source)
        made = None if identity is None else self.store.lookup(source, identity, compare=False)[0]
        if made is None:
            return None
        return made.artifact(self.parent.config.stages[source].makes).digest

    # -- the checkpoint -------------------------------------------------------------------------

    def _checkpoint(self) -> Path:
        """The parent's checkpoint after the fork's step, if need be made now."""
        found, fork = nearest_checkpoint(self.parent, self.home), self.parent.fork
        if step_of(found) == fork.step:
            return found
        begun = step_of(found)
        steps = f"steps {begun + 1} to {fork.step} are" if begun + 1 < fork.step else "this step is"
        self.reporter.say(
            f"{self.work.name}: run {self.parent.record.run_id[:12]} has a checkpoint after step "
            f"{begun} and none after {fork.step}: {steps} computed again with its settings"
        )
        folder = self._parents / f"{BETWEEN}{self.work.identity[:16]}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            made = Between(self, folder, found).compute()
            kept = step_folder(self._parents / KEPT, fork.step)
            kept.parent.mkdir(exist_ok=True)
            copy_checkpoint(made, kept, history=self._history(made))
            return kept
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _history(self, checkpoint: Path) -> list[dict[str, float]]:
        """The metrics that the parent had measured by then, evaluations among them."""
        found = {int(row["step"]): dict(row) for row in history_of(checkpoint)}
        for row in self._journal():
            if row.step in found:
                found[row.step] |= row.metrics
        return [found[step] for step in sorted(found)]

    # -- records --------------------------------------------------------------------------------

    @property
    def _parents(self) -> Path:
        """The folder of the parent's checkpoints."""
        return checkpoint_folder(self.home, self.parent.fork.name, self.parent.fork.identity)

    def kept_by_parent(self) -> Path:
        """The folder with the records of the parent's steps: its result, if it is done."""
        made = self.store.fetched(self.parent.fork.name, self.parent.fork.identity)
        return self._parents if read_manifest(made) is None else made

    def _bring_records(self) -> None:
        """The records of the shared steps, and answers that were sampled before the first."""
        step, there = self.parent.fork.step, self.kept_by_parent()
        bring_answers(self._parents, self.root)
        _link_steps(there / evidence.FOLDER, self.root / evidence.FOLDER, step)
        last = None if self._is_unchanged() else step
        _link_steps(there / episode_log.FOLDER, self.root / episode_log.FOLDER, last)
        old, new = there / step_record.FOLDER, self.root / step_record.FOLDER
        if (old / step_record.STEPS).is_file():
            values = step_record.VALUES
            _link_steps(old / values, new / values, step)
            new.mkdir(exist_ok=True)
            shutil.copyfile(old / step_record.STEPS, new / step_record.STEPS)

    def _is_unchanged(self) -> bool:
        """Whether the stage goes on exactly as its parent did.

        Samples that cannot be drawn a second time are then the parent's after the fork too.
        """
        mine, theirs = self.stage.fork, self.parent.stage.fork
        if (mine and mine.seed) != (theirs and theirs.seed):
            return False
        bare = {
            k: v for k, v in self.work.parts.items() if k != "fork" and not k.startswith("fork.")
        }
        there = flat({"fork": None if theirs is None else theirs.model_dump(mode="json")})
        bare |= {key: json.dumps(value, sort_keys=True) for key, value in there}
        return identity_of(bare) == self.parent.fork.identity

    # -- metrics --------------------------------------------------------------------------------

    def _journal(self) -> list[JournalRow]:
        """What the parent measured in the shared steps, as it was recorded."""
        fork = self.parent.fork
        rows = read_journal(journal_path(self.home / "runs", fork.name, fork.identity))
        return [row for row in rows if row.step <= fork.step]

    def _bring_metrics(self, checkpoint: Path) -> None:
        rows = self._journal() or [
            JournalRow(int(row["step"]), now_ms(), measured(_without_step(row)))
            for row in history_of(checkpoint)
        ]
        path = journal_path(self.home / "runs", self.work.name, self.work.identity)
        write_text(path, "".join(row.line() for row in rows))


def _without_step(row: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name != "step"}


def _is_whole(folder: Path) -> bool:
    try:
        check_whole(folder)
    except DamagedCheckpoint:
        return False
    return True


def _link_steps(source: Path, target: Path, last: int | None) -> None:
    """The files `step-000012...` of a folder, up to step `last`; None = all."""
    for path in sorted(source.glob("step-*")) if source.is_dir() else ():
        number = path.name.removeprefix("step-").partition(".")[0]
        if number.isdecimal() and (last is None or int(number) <= last):
            target.mkdir(parents=True, exist_ok=True)
            (target / path.name).unlink(missing_ok=True)
            link_or_copy(path, target / path.name)


def bring_answers(source: Path, target: Path) -> None:
    """The answers that the stage's model gave before the first step, where they were kept."""
    for place in (source / KEPT, source):
        if (place / OWN_ANSWERS).is_file():
            shutil.copyfile(place / OWN_ANSWERS, target / OWN_ANSWERS)


def _needs(place: str, stage: StepStage) -> bool:
    """Whether a stage goes on with the optimizer in that folder of a checkpoint."""
    if not isinstance(stage, RlStage):
        return True
    wanted = {"critic": stage.critic is not None, "implicit_prm": stage.implicit_prm is not None}
    return wanted.get(place, True)


# --- what plugins keep from step to step ---------------------------------------------------------


def carried(
    parts: Mapping[str, Any],  # Any: JSON, each part's own
    before: StepStage,
    now: StepStage,
) -> dict[str, Any]:  # Any: JSON
    """The parts of a checkpoint that the changed stage goes on with.

    A plugin whose settings are what they were goes on; one that is new or has other settings
    begins as it would at a stage's start.
    """
    found = dict(parts)
    if not (isinstance(before, RlStage) and isinstance(now, RlStage)):
        return found
    old, new = _owners(before), _owners(now)
    found = {name: state for name, state in found.items() if old.get(name) == new.get(name)}
    rollouts = dict(found["rollouts"])
    if _of(before.sampler) != _of(now.sampler):
        del rollouts["sampler"]
    if now.schedule == "streaming" and rollouts["stream"] is None:
        rollouts["stream"] = {"next": rollouts["prompts"], "again": []}
    elif now.schedule == "steps" and rollouts["stream"] is not None:
        rollouts |= {"prompts": rollouts["stream"]["next"], "stream": None}
    return found | {"rollouts": rollouts}


def _of(component: Component | None) -> object:
    return None if component is None else (component.name, component.fields())


def _owners(stage: RlStage) -> dict[str, object]:
    """The settings of whatever keeps a part of a checkpoint, by the part's name."""
    return {
        "controller": _of(stage.kl.controller),
        "estimator": _of(stage.advantage),
        "entropy_controller": _of(stage.entropy_controller),
        "reward_shaping": stage.reward_whiten,
        **{f"policy_loss/{term.name}": _of(term) for term in stage.loss_terms},
    }


# --- steps between a checkpoint and the fork -----------------------------------------------------


class _Reached(Exception):
    """The checkpoint that was wanted is written."""


class _Only(Checkpoints):
    """Writes the checkpoint after one step."""

    step = 0

    def is_due(self, step: int) -> bool:
        return step == self.step


class BetweenContext(ReplayContext):
    """Writes a checkpoint after the step of a fork, and ends there."""

    def keeper(self, total: int, checkpoint_every: int) -> Checkpoints:
        """One that writes after the fork's step alone."""
        made = _Only(self.checkpoints, total, 0, self.run.keep, self.warn)
        assert isinstance(self.steps, _Compared)
        made.step = self.steps.until
        return made

    def saved_checkpoint(self, step: int, folder: Path | None) -> None:
        """End: this is what was wanted."""
        raise _Reached


@dataclass
class _Compared:
    """Notes the first step that is not what was recorded of it."""

    folder: Path
    until: int
    differs: int | None = None

    def __post_init__(self) -> None:
        self.recorded = read_record(self.folder)

    def wants(self, step: int) -> bool:
        """As in `StepSink`."""
        return step in self.recorded and self.differs is None

    def put(self, step: int, tensors: StepTensors, metrics: Mapping[str, float]) -> None:
        """As in `StepSink`."""
        then, now = self.recorded[step], record_of(step, tensors, metrics)
        if (then.batch, then.weights) != (now.batch, now.weights):
            self.differs = step


@dataclass
class Between:
    """Computes the parent's steps from its checkpoint `begun` to the fork, in `folder`."""

    start: ForkStart
    folder: Path
    begun: Path

    def compute(self) -> Path:
        """The checkpoint; warns where a step is not what the parent recorded of it."""
        start, parent = self.start, self.start.parent
        fork = parent.fork
        resolved, manager = resolve_configs([parent.record.unchanged_config()], None)
        config = resolved.config
        inputs = inputs_read(config, parent.record, fork.name, start.home, start.store)
        there = start.kept_by_parent()
        bring_answers(self.begun.parent, self.folder)
        _link_steps(there / episode_log.FOLDER, self.folder / episode_log.FOLDER, None)
        sink = _Compared(there / step_record.FOLDER, fork.step)
        run = on_this_machine(config)
        runtime = ModelRuntime.from_config(config.model)
        task: Task[Any] = manager.task(config.task)
        with closing(EnginePool(config, manager, runtime)) as engines, suppress(_Reached):
            context = BetweenContext(
                run=run.model_copy(update={"keep": KeepSection(checkpoint_minutes=0)}),
                name=fork.name,
                stage=config.stages[fork.name],
                inputs=inputs,
                manager=manager,
                task=task,
                runtime=runtime,
                check=start.check,
                out=self.folder / "out",
                checkpoints=self.folder,
                resume_from=self.begun,
                steps=sink,
                engines=engines,
                tracker=NotTracked(),
                mlflow_uri="",
                reporter=start.reporter,
                warn=start.warn,
            )
            take_steps_again(context, fork.step, lambda loop: loop.checkpoint(fork.step))
        if sink.differs is not None:
            start.warn(
                f"{start.work.name}: step {sink.differs} of run {parent.record.run_id[:12]}, "
                "computed again, is not what was recorded of it (another machine, or another "
                "version of the program): the fork begins with what was computed now"
            )
        made = step_folder(self.folder, fork.step)
        if not made.is_dir():
            raise ResourceError(
                f"{parent.shown} ended before step {fork.step}: fork it at an earlier step"
            )
        return made
