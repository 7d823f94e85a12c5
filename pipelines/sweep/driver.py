"""Runs the branches of a sweep in processes of this machine, and keeps a record of how far it got.

A branch begins once no other is at work on a stage that it has as well: nothing is computed twice,
and no process waits for another. A branch that is on record as finished is not run again.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from posttrain.core.errors import PosttrainError, RunError
from posttrain.core.runtime.reporter import Reporter, SilentReporter
from posttrain.core.store.artifacts import ArtifactStore
from posttrain.core.store.manifests import MANIFEST
from posttrain.core.store.run_record import find_run
from posttrain.pipelines.sweep.branches import Branch, Sweep
from posttrain.pipelines.sweep.record import (
    BranchRecord,
    SweepRecord,
    read_record,
    sweep_folder,
    write_record,
)
from posttrain.pipelines.sweep.workers import Json, Messages, Worker

DONE = ("finished", "stopped", "pruned")


class Judge(Protocol):
    """Decides at evaluations during training which branches go no further."""

    def seen(self, record: SweepRecord, branch: Branch, stage: str, step: int) -> str:
        """Why the variant of `branch` is stopped, after a new evaluation; empty if it goes on."""


def steps_of(branch: Branch, stage: str) -> int:
    """The optimizer steps of a stage, 0 of one that takes none or does not say how many."""
    return int(getattr(branch.resolved.config.stages[stage], "steps", 0) or 0)


@dataclass
class Driver:
    """A sweep in progress. `tags` are those of every run in MLflow."""

    sweep: Sweep
    home: Path
    store: Path
    store_name: str
    parallel: int = 1
    reporter: Reporter = field(default_factory=SilentReporter)
    tags: Mapping[str, str] = field(default_factory=dict)
    judge: Judge | None = None
    ended: Callable[[Branch, BranchRecord], None] = lambda branch, found: None

    def __post_init__(self) -> None:
        self.folder = sweep_folder(self.home, self.sweep.name)
        self.record = read_record(self.folder)
        self.messages: Messages = queue.SimpleQueue()
        self.workers: list[Worker] = []
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
        """Start the processes, which load what they need while the configs are looked at."""
        threads = max(1, (os.cpu_count() or 1) // self.parallel) if self.parallel > 1 else 0
        while len(self.workers) < self.parallel:
            log = self.folder / f"worker-{len(self.workers) + 1}.log"
            self.workers.append(Worker(self.home, log, threads, self.messages))

    def run(self, branches: Sequence[Branch]) -> None:
        """Run what is not done; returns when all have ended, each in its own way."""
        waiting = [branch for branch in branches if not self.is_done(branch)]
        for branch in branches:
            if branch not in waiting:
                found = self.of(branch)
                self.reporter.say(f"{branch.label}: {found.status} before, run {found.run_id[:12]}")
        self.start()
        while waiting or any(worker.branch for worker in self.workers):
            self._begin(waiting)
            if not any(worker.branch for worker in self.workers):
                continue
            worker, message = self.messages.get()
            if message is None:
                self._lost(worker)
            elif worker.branch is not None:
                self._handle(worker, worker.branch, message, waiting)

    def _begin(self, waiting: list[Branch]) -> None:
        """Give each idle process the first branch that shares no stage that is being computed."""
        for worker in self.workers:
            if worker.branch is not None:
                continue
            busy = {known for other in self.workers for known in other.pending}
            branch = next((b for b in waiting if not busy & set(b.stages.values())), None)
            if branch is None:
                return
            waiting.remove(branch)
            self._start(worker, branch)

    def _start(self, worker: Worker, branch: Branch) -> None:
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
        worker.run(branch, self.sweep.configs, self.home, self.store_name, tags)

    def _handle(self, worker: Worker, branch: Branch, message: Json, waiting: list[Branch]) -> None:
        found, event = self.of(branch), message["event"]
        if event == "opened":
            found.run_id = message["run_id"]
        elif event == "step":
            self._stepped(branch, message)
        elif event == "warn":
            self.reporter.warn(f"{branch.label}: {message['text']}")
        elif event == "stage_finished":
            self._stage_finished(worker, branch, message)
        elif event == "evaluated":
            found.right[message["step"]] = message["right"]
            found.problems = message["problems"]
            self._judged(branch, message, waiting)
        elif event == "ended":
            self._branch_ended(worker, branch, message["status"], message["reason"])
        if event != "step":
            write_record(self.folder, self.record)

    def _stepped(self, branch: Branch, message: Json) -> None:
        steps = self._steps[branch.key]
        if not steps_of(branch, message["stage"]):
            return
        steps[message["stage"]] = message["step"]
        self.of(branch).step = message["step"]
        self.reporter.step_done(branch.label, sum(steps.values()), message["metrics"])

    def _stage_finished(self, worker: Worker, branch: Branch, message: Json) -> None:
        found, stage, status = self.of(branch), message["stage"], message["status"]
        if status == "cached":
            found.reused.append(stage)
        else:
            found.computed[stage] = found.computed.get(stage, 0.0) + message["seconds"]
        if status not in ("failed", "killed"):
            worker.pending.discard(branch.stages.get(stage, ""))
            self._steps[branch.key][stage] = steps_of(branch, stage)

    def _judged(self, branch: Branch, message: Json, waiting: list[Branch]) -> None:
        """Stop the variant of a branch with all its seeds, if that is decided."""
        if self.judge is None:
            return
        reason = self.judge.seen(self.record, branch, message["stage"], message["step"])
        if not reason:
            return
        for worker in self.workers:
            if worker.branch is not None and worker.branch.variant == branch.variant:
                self.of(worker.branch).reason = reason
                worker.stop_run()
        for other in [b for b in waiting if b.variant == branch.variant]:
            waiting.remove(other)
            found = self.of(other)
            found.status, found.reason = "stopped", f"not begun: {reason}"

    def _branch_ended(self, worker: Worker, branch: Branch, status: str, reason: str) -> None:
        found = self.of(branch)
        worker.branch, worker.pending = None, set()
        found.reason = reason or (found.reason if status == "stopped" else "")
        if status == "interrupted":
            found.status = "waiting"
            raise KeyboardInterrupt
        found.status = status  # type: ignore[assignment] # what a worker reports is a Status
        seconds = sum(found.computed.values())
        self.reporter.stage_finished(branch.label, status, seconds, {})
        if status == "failed":
            self.reporter.warn(f"{branch.label}: {found.reason}")
        self.ended(branch, found)

    def _lost(self, worker: Worker) -> None:
        """A process ended by itself: its branch failed, and another takes its place."""
        self.workers.remove(worker)
        if worker.branch is None:
            if not self.workers:
                raise RunError(f"no process of the sweep could start: {worker.how_it_ended()}")
            return
        self._branch_ended(worker, worker.branch, "failed", worker.how_it_ended())
        write_record(self.folder, self.record)
        self.start()

    def close(self, *, interrupted: bool = False) -> None:
        """End all processes; nothing of them is left when this returns."""
        try:
            for worker in self.workers:
                worker.interrupt()
            for worker in self.workers:
                worker.end()
        except KeyboardInterrupt:  # a second one does not wait
            pass
        finally:
            for worker in self.workers:
                if worker.process.poll() is None:
                    worker.kill()
            if interrupted:
                for found in self.record.branches.values():
                    if found.status == "running":
                        found.status = "waiting"
                write_record(self.folder, self.record)
