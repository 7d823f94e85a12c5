"""A process that runs branches of a sweep, one after another: `python -m` this, by `Worker`.

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.core.errors import PosttrainError
from posttrain.core.redaction import redacted

if TYPE_CHECKING:
    from posttrain.core.evaluation.accuracy import Evaluation
    from posttrain.pipelines.run.pipeline import Pipeline
    from posttrain.pipelines.run.prefect_server import OwnServer

SHOWN = ("reward/mean", "acc/mean", "sft/loss", "eval/greedy_accuracy", "loss/preference")
"""Metrics of a step that a sweep shows while it runs."""
Json = dict[str, Any]  # Any: JSON
Send = Callable[..., None]


@dataclass
class ToTheSweep:
    """A `Reporter` whose audience is another process."""

    send: Send

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

    waiting: queue.SimpleQueue[Json | None] = field(default_factory=queue.SimpleQueue)
    at_work: str = ""
    """The key of the branch that runs; one that has ended since is not stopped in its place."""
    stop: threading.Event = field(default_factory=threading.Event)
    over: bool = False

    def read(self) -> None:
        """Until the sweep closes its end."""
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "run":
                self.waiting.put(command)
            elif command["key"] == self.at_work:
                self.stop.set()
        self.over = True
        self.waiting.put(None)
        os.kill(os.getpid(), signal.SIGINT)


def main() -> None:
    """Run branches until standard input ends."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
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
            jobs.at_work = job["key"]
            status, reason = run_branch(job, server, jobs, send)
            jobs.at_work = ""
            send("ended", status=status, reason=reason)
            if status == "interrupted":
                break
    except KeyboardInterrupt:
        pass


def run_branch(job: Json, server: OwnServer, jobs: Jobs, send: Send) -> tuple[str, str]:
    """Run one branch; returns how it ended, and why if it did not finish."""
    from posttrain.pipelines.run.checks import folders, resolve_configs
    from posttrain.pipelines.run.execute import RunOptions, execute

    def opened(pipeline: Pipeline) -> None:
        pipeline.tracker.set_tags(job["tags"])
        pipeline.evaluated = evaluated
        send("opened", run_id=pipeline.tracker.run_id)

    def evaluated(stage: str, step: int, result: Evaluation) -> None:
        from posttrain.core.data.problem_sets import problems_digest

        right = "".join("1" if row.greedy_correct >= 1 else "0" for row in result.rows)
        digest = problems_digest([row.problem for row in result.rows])
        send("evaluated", stage=stage, step=step, right=right, problems=digest)

    configs = [Path(c) if isinstance(c, str) else c for c in job["configs"]]
    try:
        resolved, manager = resolve_configs(configs, job["overrides"])
        home, store = folders(Path(job["home"]), job["store"])
        options = RunOptions(
            home=home,
            store=store,
            server=server,
            stop=jobs.stop,
            opened=opened,
        )
        result = execute(resolved, manager, options, ToTheSweep(send))
    except PosttrainError as error:
        return "failed", str(error)
    except KeyboardInterrupt:
        return ("stopped", "") if jobs.stop.is_set() and not jobs.over else ("interrupted", "")
    except Exception as error:  # of a plugin or a library: the other branches go on
        traceback.print_exc()
        first = (str(error).splitlines() or ["no message"])[0]
        return "failed", redacted(f"unexpected {type(error).__name__}: {first}")
    return ("finished", "") if result.status == "completed" else ("failed", result.status)


if __name__ == "__main__":
    main()
