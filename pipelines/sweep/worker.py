"""A process that runs branches of a sweep, one after another: `python -m` this, by `ProcessPlace`.

What a run needs is loaded once, and Prefect's server is started once. Jobs come as lines of JSON on
standard input, and what happens goes out as lines of JSON; whatever libraries print goes to the
log. The end of standard input, which is the end of the sweep, ends the run at its next safe point.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.core.errors import PosttrainError
from posttrain.core.redaction import redact_output, redacted
from posttrain.pipelines.sweep.places import BranchRequest, Json

if TYPE_CHECKING:
    from posttrain.core.evaluation.accuracy import Evaluation
    from posttrain.core.runtime.reporter import Reporter
    from posttrain.pipelines.run.pipeline import Pipeline
    from posttrain.pipelines.run.prefect_server import OwnServer

SHOWN = ("reward/mean", "acc/mean", "sft/loss", "eval/greedy_accuracy", "loss/preference")
"""Metrics of a step that a sweep shows while it runs."""
Send = Callable[..., None]


@dataclass
class ToTheSweep:
    """A `Reporter` whose audience is another process."""

    send: Send

    def stage_reached(self, stage: str) -> None: ...

    def stage_started(self, stage: str, kind: str, total_steps: int) -> None:
        self.send("stage_started", stage=stage, total=total_steps)

    def step_done(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        found = {name: metrics[name] for name in SHOWN if name in metrics}
        self.send("step", stage=stage, step=step, metrics=found)

    def stage_finished(
        self, stage: str, status: str, seconds: float, metrics: Mapping[str, float]
    ) -> None:
        self.send("stage_finished", stage=stage, status=status, seconds=seconds)

    def say(self, text: str) -> None: ...

    def warn(self, text: str) -> None:
        self.send("warn", text=text)


@dataclass
class Jobs:
    """What the sweep asked for: runs in order, and whether the one at work is to stop."""

    waiting: queue.SimpleQueue[BranchRequest | None] = field(default_factory=queue.SimpleQueue)
    at_work: str = ""
    """The key of the branch that runs; one that has ended since is not stopped in its place."""
    stop: threading.Event = field(default_factory=threading.Event)
    asked: bool = False
    """Whether the sweep asked for that stop; a signal sets it too."""
    over: bool = False

    def read(self) -> None:
        """Until the sweep closes its end."""
        for line in sys.stdin:
            command = json.loads(line)
            if command.pop("do") == "run":
                self.waiting.put(BranchRequest.model_validate(command))
            elif command["key"] == self.at_work:
                self.asked = True
                self.stop.set()
        self.over = True
        self.waiting.put(None)
        os.kill(os.getpid(), signal.SIGINT)


def main() -> None:
    """Run branches until standard input ends."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    redact_output()
    lock, home = threading.Lock(), Path(sys.argv[1])

    def send(event: str, **values: object) -> None:
        # Without a sweep nobody reads: the end of standard input ends the run in order.
        with lock, contextlib.suppress(BrokenPipeError):
            out.write(json.dumps({"event": event, **values}) + "\n")

    jobs = Jobs()
    threading.Thread(target=jobs.read, daemon=True, name="jobs").start()
    try:
        from posttrain.pipelines.run.prefect_env import configure_prefect
        from posttrain.pipelines.run.prefect_server import OwnServer

        server = OwnServer(home)
        configure_prefect(home)
        import posttrain.pipelines.run.assembly  # noqa: F401 - loaded before the first run needs it

        while (job := jobs.waiting.get()) is not None:
            jobs.stop.clear()
            jobs.asked = False
            jobs.at_work = job.key
            last = run_branch(job, send, jobs.stop, server)
            jobs.at_work = ""
            if last["status"] == "stopped" and (jobs.over or not jobs.asked):
                send("ended", **ended("interrupted"))
                break
            send("ended", **last)
    except KeyboardInterrupt:
        pass


def run_branch(
    request: BranchRequest,
    send: Send,
    stop: threading.Event,
    server: OwnServer | None = None,
    also: Sequence[Reporter] = (),
) -> Json:
    """Run one branch; returns how it ended, and why if it did not finish.

    What happens is sent, and reported to `also`. A run that `stop` or a signal ended is `stopped`.
    """
    from posttrain.pipelines.run.checks import folders, resolve_configs
    from posttrain.pipelines.run.execute import RunOptions, execute
    from posttrain.pipelines.run.progress import Reporters

    def opened(pipeline: Pipeline) -> None:
        pipeline.tracker.set_tags(request.tags)
        pipeline.evaluated = evaluated
        send("opened", run_id=pipeline.tracker.run_id)

    def evaluated(stage: str, step: int, result: Evaluation) -> None:
        from posttrain.core.data.problem_sets import problems_digest

        right = "".join("1" if row.greedy_correct >= 1 else "0" for row in result.rows)
        digest = problems_digest([row.problem for row in result.rows])
        send("evaluated", stage=stage, step=step, right=right, problems=digest)

    configs = [Path(c) if isinstance(c, str) else c for c in request.configs]
    try:
        home, store = folders(Path(request.home), request.store)
        resolved, manager = resolve_configs(configs, request.overrides)
        options = RunOptions(home=home, store=store, server=server, stop=stop, opened=opened)
        result = execute(resolved, manager, options, Reporters([ToTheSweep(send), *also]))
    except PosttrainError as error:
        return ended("failed", str(error))
    except KeyboardInterrupt:
        return ended("stopped")
    except Exception as error:  # of a plugin or a library: the other branches go on
        traceback.print_exc()
        first = (str(error).splitlines() or ["no message"])[0]
        return ended("failed", redacted(f"unexpected {type(error).__name__}: {first}"))
    if result.status != "completed":
        return ended("failed", result.status)
    return ended("finished", run=record_of(home, result.run_id))


def ended(status: str, reason: str = "", run: Json | None = None) -> Json:
    """The last message of a branch; `run` is its run's record."""
    return {"status": status, "reason": reason, "run": run}


def record_of(home: Path, run_id: str) -> Json:
    """What a home keeps of a run, for a sweep that has another home."""
    from posttrain.core.store.run_record import find_run

    run = find_run(home, run_id)
    return {
        "name": run.name,
        "began": run.began,
        "stages": dict(run.stages),
        "warnings": list(run.warnings),
        "config": run.config.read_text(),
    }


if __name__ == "__main__":
    main()
