"""What Prefect and MLflow add to an RL step, in milliseconds; prints one JSON line.

Drives the real RL flow of `pipelines/rl/flow.py` (real Prefect tasks, real SQLite MLflow, sample
tables) over a loop whose phases do nothing, so that all of a step's time is orchestration and
tracking. The step pauses a tenth of a second for MLflow's writer thread, far less than a real step
gives it.

    python tests/bench/overhead.py [--steps 100]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from posttrain.core.tracking.metric_names import METRICS
from posttrain.pipelines.run.prefect_env import configure_prefect

ROWS = [
    {"group": i // 8, "prompt": "What is 23+45?", "response": "23 + 45 = 68", "reward": 1.0}
    for i in range(64)
]


class EmptyLoop:
    """The loop, its rollouts and its recorder, with phases that do nothing.

    A step records what a real one records.
    """

    evaluates_before_first_step = False
    max_staleness = 0

    def __init__(self, tracker: Any, steps: int) -> None:
        self.tracker, self.steps, self.seconds, self.step = tracker, steps, [], 0
        names = [n for n in METRICS if not n.startswith(("eval/", "rm/", "sft/"))][:50]
        self.metrics = dict.fromkeys(names, 0.5)
        self.recorder = self.rollouts = self

    def remaining_steps(self) -> range:
        return range(1, self.steps + 1)

    def begin_step(self, step: int) -> None:
        self.began = time.perf_counter()

    def sample(self, step: int) -> SimpleNamespace:
        return SimpleNamespace()

    def run(self, phase: Any, *args: Any) -> Any:
        return phase(*args)

    def take(self, rollout: SimpleNamespace) -> bool:
        return True

    def score_rewards(self, rollout: SimpleNamespace) -> SimpleNamespace:
        return rollout

    compute_advantages = update_policy = score_rewards

    def updated(self, update: SimpleNamespace) -> None:
        self.step += 1
        self.tracker.log_table("samples", self.step, ROWS)

    def sync_weights(self, step: int) -> None: ...

    def check_sync(self, event: str) -> None: ...

    def evaluation_is_due(self, step: int) -> bool:
        return False

    def checkpoint_is_due(self, step: int) -> bool:
        return False

    def end_step(self, step: int) -> None:
        self.tracker.log_step(step, {k: v + step for k, v in self.metrics.items()})
        self.seconds.append(time.perf_counter() - self.began)
        time.sleep(0.1)  # a real step leaves the writer far more time than this


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(steps: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        configure_prefect(home)
        from prefect import flow
        from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

        from posttrain.core.tracking.mlflow_store import prepare_database
        from posttrain.core.tracking.mlflow_tracker import PipelineTracker
        from posttrain.pipelines.rl.flow import run_steps

        tracker = PipelineTracker.start(
            uri=prepare_database(home),
            experiment="overhead",
            run_name="overhead",
            config_yaml="",
            params={},
            tags={},
            journal=home / "runs",
        )
        loop = EmptyLoop(tracker.stage("rl", "rl", {}), steps)

        @flow(name="overhead", validate_parameters=False, persist_result=False)
        def run() -> None:
            run_steps("rl", loop)

        with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
            began = cpu_seconds()
            run()
            spent = cpu_seconds() - began
        tracker.finish("FINISHED")
    timed = sorted(1000 * s for s in loop.seconds[5:])
    return {
        "benchmark": "overhead",
        "steps": len(timed),
        "median_ms": round(statistics.median(timed), 1),
        "p90_ms": round(timed[int(0.9 * len(timed))], 1),
        "cpu_ms_per_step_all_threads": round(1000 * spent / steps, 1),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    print(json.dumps(measure(parser.parse_args().steps)))
