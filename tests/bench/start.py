"""How long `posttrain run` of a tiny config takes to its first stage, and to that stage's steps.

    python tests/bench/start.py [--rounds 3] [--lines] [--threads 2]

Each round starts the command twice: in a new home, and again in that home. Wall time is from the
start of the process to the line that its first stage is reached, and to the line that the stage has
read its model and data and starts its steps; processor time, which others on the machine disturb
less, is of the process and of its own Prefect server at the second line. The command is then
killed. With `--lines` each line that it prints comes with its time.

A first run, which is not counted, writes the bytecode that an installation has.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import yaml

CONFIG = {
    "name": "start",
    "engine": "transformers",
    "model": {"source": "posttrain/tiny-random", "dtype": "float32", "max_model_len": 256},
    "task": {"name": "arithmetic", "left_digits": [1, 1], "right_digits": [1, 1]},
    "evaluation": {"num_problems": 4, "max_response_length": 8, "num_samples": 1},
    "stages": {
        "sft": {"kind": "sft", "inputs": {"model": "base"}, "steps": 200, "batch_size": 8},
        "rl": {"kind": "rl", "inputs": {"model": "sft"}, "steps": 4},
    },
}


Times = tuple[float, float, float, float]
"""Wall time to the stage and to its steps, and processor time of the run and of its server."""


def started(config: Path, home: Path, threads: int, lines: bool) -> Times:
    """Seconds until the first stage and its steps."""
    names = ("PREFECT_", "MLFLOW_", "POSTTRAIN_", "PYTHONDONTWRITEBYTECODE")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(names)}
    own = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "posttrain.pipelines.cli"]
        + ["run", str(config), "--home", str(home), "--plain"],
        env=clean | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    said, reached = [], 0.0
    for line in process.stdout:
        wall = time.perf_counter() - began
        said.append(line)
        if lines:
            print(f"  {wall:6.2f}  {line}", end="")
        if "] reads its inputs" in line:
            reached = wall
        if "] started (" in line:
            tree = [psutil.Process(process.pid)]
            tree += tree[0].children(recursive=True)
            each = [sum(one.cpu_times()[:4]) for one in tree]
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            psutil.wait_procs(tree[1:], timeout=10)  # they end with it
            return reached, wall, each[0], sum(each[1:])
    raise SystemExit("no stage has started:\n" + "".join(said))


def shown(name: str, times: Sequence[float]) -> str:
    stage, steps, run, server = times
    return (
        f"{name:>8}  stage {stage:5.2f} s, its steps {steps:5.2f} s  "
        f"processor: run {run:5.2f} s, server {server:5.2f} s"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lines", action="store_true")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    found: dict[str, list[Times]] = {"new home": [], "again": []}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "start.yaml"
        config.write_text(yaml.safe_dump(CONFIG))
        started(config, Path(folder) / "first", options.threads, lines=False)
        for number in range(options.rounds):
            home = Path(folder) / f"home-{number}"
            for name, all_times in found.items():
                all_times.append(started(config, home, options.threads, options.lines))
                print(shown(name, all_times[-1]), flush=True)
    print(f"medians (load {os.getloadavg()[0]:.1f})")
    for name, all_times in found.items():
        print(shown(name, [statistics.median(column) for column in zip(*all_times, strict=True)]))


if __name__ == "__main__":
    main()
