"""Runs the branches of a sweep where its placement says, and keeps a record of how far it got.

A branch begins once no other is at work on a stage that it has as well: nothing is computed twice,
and no branch waits for another while it runs. A branch that is on record as finished is not run
again.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from posttrain.core.config.loading import find_config
from posttrain.core.errors import PosttrainError, RunError
from posttrain.core.runtime.reporter import Reporter, SilentReporter
from posttrain.core.store.artifacts import ArtifactStore
from posttrain.core.store.manifests import MANIFEST
from posttrain.core.store.run_record import RECORD, RunRecorder, find_run
from posttrain.pipelines.sweep.branches import Branch, Sweep
from posttrain.pipelines.sweep.places import Json, Messages, Place, Placement, sent
from posttrain.pipelines.sweep.record import (
    BranchRecord,
    SweepRecord,
    read_record,
    sweep_folder,
    write_record,
)

DONE = ("finished", "stopped", "pruned")


class Judge(Protocol):
    """Decides at evaluations during training which branches go no further."""

    def seen(self, record: SweepRecord, branch: Branch, stage: str, step: int) -> str:
        """Why the variant of `branch` is stopped, after a new evaluation; empty if it goes on."""


def steps_of(branch: Branch, stage: str) -> int:
    """The optimizer steps of a stage, 0 of one that takes none or does not say how many."""
    return int(getattr(branch.resolved.config.stages[stage], "steps", 0) or 0)


def _found(config: Path) -> str:
    """A file is found from elsewhere by its whole path, a shipped config by its name."""
    return str(find_config(config).resolve() if config.exists() else config)


@dataclass
class Driver:
    """A sweep in progress. `tags` are those of every run in MLflow."""

    sweep: Sweep
    home: Path
    store: Path
    store_name: str
    placement: Placement
    reporter: Reporter = field(default_factory=SilentReporter)
    tags: Mapping[str, str] = field(default_factory=dict)
    judge: Judge | None = None
    ended: Callable[[Branch, BranchRecord], None] = lambda branch, found: None

    def __post_init__(self) -> None:
        self.folder = sweep_folder(self.home, self.sweep.name)
        self.record = read_record(self.folder)
        self.messages: Messages = queue.SimpleQueue()
        self.places: list[Place] = []
        self._artifacts = ArtifactStore(self.store)
        self._steps: dict[str, dict[str, int]] = {}

    # -- what there is ------------------------------------------------------------------------

    def of(self, branch: Branch) -> BranchRecord:
        """The record of a branch."""
        empty = BranchRecord(variant=branch.variant, seed=branch.seed)
        found = self.record.branches.setdefault(branch.key, empty)
        found.variant, found.seed = branch.variant, branch.seed  # it may have another name now
        return found

    def is_done(self, branch: Branch) -> bool:
        """Whether an earlier sweep finished it, and what it made is still there."""
        found = self.record.branches.get(branch.key)
        if found is None or found.status not in DONE:
            return False
        if found.status != "finished":
            return self.judge is not None  # without early stopping it goes on
        try:
            run = find_run(self.home, found.run_id)
        except PosttrainError:
            return False
        folders = (self._artifacts.fetched(n, i) for n, i in run.stages.items())
        return all((folder / MANIFEST).is_file() for folder in folders)

    # -- running ------------------------------------------------------------------------------

    def start(self) -> None:
        """Open the places, which load what they need while the configs are looked at."""
        while len(self.places) < self.placement.most:
            self.places.append(self.placement.open(self.messages))

    def run(self, branches: Sequence[Branch]) -> None:
        """Run what is not done; returns when all have ended, each in its own way."""
        waiting = [branch for branch in branches if not self.is_done(branch)]
        for branch in branches:
            if branch not in waiting:
                found = self.of(branch)
                self.reporter.say(f"{branch.label}: {found.status} before, run {found.run_id[:12]}")
        self.start()
        while waiting or any(place.branch for place in self.places):
            self._begin(waiting)
            place, message = self.messages.get()
            if message is None:
                self._lost(place)
            elif place.branch is not None:
                self._handle(place, place.branch, message, waiting)

    def _begin(self, waiting: list[Branch]) -> None:
        """Give each idle place the first branch that shares no stage that is being computed."""
        for place in self.places:
            if place.branch is not None or not place.is_ready:
                continue
            busy = {known for other in self.places for known in other.pending}
            branch = next((b for b in waiting if not busy & set(b.stages.values())), None)
            if branch is None:
                return
            waiting.remove(branch)
            self._start(place, branch)

    def _start(self, place: Place, branch: Branch) -> None:
        found = self.of(branch)
        found.status, found.reason, found.reused = "running", "", []
        write_record(self.folder, self.record)
        self._steps[branch.key] = {}
        total = sum(steps_of(branch, stage) for stage in branch.stages)
        self.reporter.stage_started(branch.label, f"{len(branch.stages)} stages", total)
        tags = {
            **self.tags,
            "posttrain.sweep": self.sweep.name,
            "posttrain.variant": branch.variant,
        }
        configs = [_found(each) if isinstance(each, Path) else each for each in self.sweep.configs]
        where = {"home": str(self.home), "store": self.store_name}
        place.run(branch, sent(branch, configs=configs, tags=tags, **where))

    def _handle(self, place: Place, branch: Branch, message: Json, waiting: list[Branch]) -> None:
        found, event = self.of(branch), message["event"]
        if event == "opened":
            found.run_id = message["run_id"]
        elif event == "step":
            self._stepped(branch, message)
        elif event == "warn":
            self.reporter.warn(f"{branch.label}: {message['text']}")
        elif event == "stage_finished":
            self._stage_finished(place, branch, message)
        elif event == "evaluated" and not found.reason:  # a stopped run may take a few steps more
            found.right[message["step"]] = message["right"]
            found.problems = message["problems"]
            self._judged(branch, message, waiting)
        elif event == "ended":
            status, reason = message["status"], message["reason"]
            if status == "finished" and (missing := self.missing(found.run_id, message["run"])):
                status, reason = "failed", missing
            self._branch_ended(place, branch, status, reason)
        if event != "step":
            write_record(self.folder, self.record)

    def missing(self, run_id: str, run: Json) -> str:
        """What of a finished run cannot be found here, in a sentence; empty if all is there.

        The record of a run that has another home comes with its last message.
        """
        if not (self.home / "runs" / run_id / RECORD).is_file():
            recorder = RunRecorder(self.home, run_id, run["name"], run["began"], run["config"])
            for stage, identity in run["stages"].items():
                recorder.stage(stage, identity)
            for text in run["warnings"]:
                recorder.warn(text)
        for stage, identity in run["stages"].items():
            if not (self._artifacts.fetched(stage, identity) / MANIFEST).is_file():
                return (
                    f"run {run_id[:12]} finished, but the result of its stage '{stage}' is not in "
                    f"{self.store_name} here: give --home a folder that the workers share, at the "
                    "same path, or --store a URL"
                )
        return ""

    def _stepped(self, branch: Branch, message: Json) -> None:
        steps = self._steps[branch.key]
        if not steps_of(branch, message["stage"]):
            return
        steps[message["stage"]] = message["step"]
        self.of(branch).step = message["step"]
        self.reporter.step_done(branch.label, sum(steps.values()), message["metrics"])

    def _stage_finished(self, place: Place, branch: Branch, message: Json) -> None:
        found, stage, status = self.of(branch), message["stage"], message["status"]
        if status == "cached":
            found.reused.append(stage)
        else:
            found.computed[stage] = found.computed.get(stage, 0.0) + message["seconds"]
        if status not in ("failed", "killed"):
            place.pending.discard(branch.stages.get(stage, ""))
            self._steps[branch.key][stage] = steps_of(branch, stage)

    def _judged(self, branch: Branch, message: Json, waiting: list[Branch]) -> None:
        """Stop the variant of a branch with all its seeds, if that is decided."""
        if self.judge is None:
            return
        reason = self.judge.seen(self.record, branch, message["stage"], message["step"])
        if not reason:
            return
        for place in self.places:
            if place.branch is not None and place.branch.variant == branch.variant:
                self.of(place.branch).reason = reason
                place.stop_run()
        for other in [b for b in waiting if b.variant == branch.variant]:
            waiting.remove(other)
            found = self.of(other)
            found.status, found.reason = "stopped", f"not begun: {reason}"

    def _branch_ended(self, place: Place, branch: Branch, status: str, reason: str) -> None:
        found = self.of(branch)
        place.branch, place.pending = None, set()
        found.reason = reason or (found.reason if status == "stopped" else "")
        if status == "interrupted":
            found.status = "waiting"
            raise KeyboardInterrupt
        found.status = status  # type: ignore[assignment] # what a place reports is a Status
        seconds = sum(found.computed.values())
        self.reporter.stage_finished(branch.label, status, seconds, {})
        if status == "failed":
            self.reporter.warn(f"{branch.label}: {found.reason}")
        self.ended(branch, found)

    def _lost(self, place: Place) -> None:
        """A place ended by itself: its branch failed, and another is opened instead."""
        self.places.remove(place)
        if place.branch is None:
            if not self.places:
                raise RunError(f"no branch of the sweep can begin: {place.how_it_ended()}")
            return
        self._branch_ended(place, place.branch, "failed", place.how_it_ended())
        write_record(self.folder, self.record)
        self.start()

    def close(self, *, interrupted: bool = False) -> None:
        """End all places; nothing of them is left when this returns."""
        try:
            for place in self.places:
                place.interrupt()
            for place in self.places:
                place.end()
        except KeyboardInterrupt:  # a second one does not wait
            pass
        finally:
            for place in self.places:
                place.kill()
            self.placement.close()
            if interrupted:
                for found in self.record.branches.values():
                    if found.status == "running":
                        found.status = "waiting"
                write_record(self.folder, self.record)
