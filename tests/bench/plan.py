"""Is `posttrain plan` right? Plans a run, does it, and compares; prints one JSON line.

`posttrain plan --json CONFIG` and `posttrain run --json CONFIG` are the real commands, in a home of
their own, one after the other. For each stage and figure the line has the estimate, what was
measured and their ratio (estimate / measured):

- `step_s`: a mean step. rl: `time/step_s` and each phase's `time/*_s`, of all steps; sft: the time
  between the records of its steps; reward_model and preference: the same, but the median, as the
  last step may have fewer pairs. An evaluation has none.
- `seconds`: the whole stage, as the run reports it.
- `memory_gb`: largest resident size of the run's process until the stage's end, read from /proc.
- `disk_gb`: what the stage left in `artifacts/`.

`accuracy` is what evaluations found, with its interval: the same run tells whether it learned.

    python tests/bench/plan.py quickstart --set stages.rl.steps=4 --set engine=transformers
    python tests/bench/plan.py --tiny
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
if str(REPO) not in sys.path:
    sys.path.append(str(REPO))

from tests.helpers.pipeline import COMMAND, prepared, tiny_config, write_config  # noqa: E402
from tests.helpers.tiny import make_tiny_model  # noqa: E402

STEP_METRICS = {"sft": "sft/loss", "reward_model": "loss/preference", "preference": "grad/norm"}
"""A metric that each step of a stage records, when it is over."""


def command(name: str, config: str, home: Path, options: argparse.Namespace) -> list[str]:
    """`posttrain NAME CONFIG` with the bench's overrides."""
    sets = [word for one in options.set for word in ("--set", one)]
    return [*COMMAND, name, config, *sets, "--home", str(home), "--json"]


def last_line(process: subprocess.Popen[str], out: Path) -> dict[str, Any]:
    """The JSON object that a command ends with."""
    lines = out.read_text().strip().splitlines()
    if process.returncode or not lines:
        raise SystemExit(f"code {process.returncode}: {lines[-1:]}; its text is above")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def run(arguments: list[str], folder: Path, peaks: list[tuple[float, float]]) -> dict[str, Any]:
    """Run a command to its end, noting (time, peak GB) of its process ten times a second."""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    out = folder / f"{arguments[len(COMMAND)]}.json"
    with out.open("w") as stream:
        process = subprocess.Popen(arguments, stdout=stream, stderr=sys.stderr, env=env, text=True)
        watcher = threading.Thread(target=watch, args=(process.pid, peaks), daemon=True)
        watcher.start()
        process.wait()
    watcher.join()
    return last_line(process, out)


def watch(pid: int, peaks: list[tuple[float, float]]) -> None:
    """Append (seconds since the epoch, largest resident size so far in GB) until it ends."""
    while True:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return
        line = next((line for line in status.splitlines() if line.startswith("VmHWM")), None)
        if line is None:  # a process that has ended and is not waited for yet
            return
        peaks.append((time.time(), int(line.split()[1]) * 1024 / 1e9))
        time.sleep(0.1)


def measured(
    result: dict[str, Any], home: Path, peaks: list[tuple[float, float]]
) -> dict[str, dict[str, float]]:
    """What the run took, by stage and figure."""
    from mlflow import MlflowClient

    client, found = MlflowClient(result["mlflow_uri"]), {}
    for name, stage in result["stages"].items():
        run_id = stage["mlflow_run_id"]
        ended = client.get_run(run_id).info.end_time / 1000
        folder = next((home / "artifacts").glob(f"{name}-*"))
        files = (path for path in folder.rglob("*") if path.is_file())
        figures = {
            "seconds": float(stage["seconds"]),
            "memory_gb": max(peak for at, peak in peaks if at <= ended),
            "disk_gb": sum(path.stat().st_size for path in files) / 1e9,
        }
        if stage["kind"] == "rl":
            figures |= rl_figures(client, run_id)
        elif stage["kind"] in STEP_METRICS:
            history = client.get_metric_history(run_id, STEP_METRICS[stage["kind"]])
            times = sorted(point.timestamp / 1000 for point in history)
            between = [later - sooner for sooner, later in itertools.pairwise(times)]
            typical = statistics.mean if stage["kind"] == "sft" else statistics.median
            if between:
                figures["step_s"] = typical(between)
        found[name] = figures
    return found


def rl_figures(client: Any, run_id: str) -> dict[str, float]:
    """Mean seconds of a step and of its phases; a phase counts 0 in steps that have none."""
    names = [n for n in client.get_run(run_id).data.metrics if n.startswith("time/")]
    steps = {p.step: p.value for p in client.get_metric_history(run_id, "time/step_s")}
    found = {"step_s": statistics.mean(steps.values())}
    for name in names:
        if not name.endswith("_s") or name == "time/step_s":
            continue
        values = {p.step: p.value for p in client.get_metric_history(run_id, name)}
        phase = name.removeprefix("time/").removesuffix("_s")
        found[phase] = statistics.mean(values.get(step, 0.0) for step in steps)
    return found


def compare(
    plan: dict[str, Any], run_result: dict[str, dict[str, float]]
) -> dict[str, dict[str, dict[str, float]]]:
    """Estimate, measurement and ratio of every figure that both have."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    peak = 0.0
    for row in plan["stages"]:
        # The kernel tells a process's peak so far, never a stage's own.
        peak = max(peak, row["memory_gb"])
        estimate = {**row, **row.get("phases", {}), "memory_gb": peak}
        own = found.setdefault(row["stage"], {})
        for name, value in run_result[row["stage"]].items():
            guess = estimate.get(name)
            if isinstance(guess, int | float) and value > 0:
                own[name] = {
                    "estimate": round(guess, 4),
                    "measured": round(value, 4),
                    "ratio": round(guess / value, 3),
                }
    return found


def bench(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Plan, run, compare."""
    config, home = options.config, prepared(folder / "home")
    if options.tiny:
        model = make_tiny_model(folder / "model")
        config = str(write_config(folder / "tiny.yaml", tiny_config(model)))
    if options.models is not None:  # the bundled model, converted by an earlier run
        (home / "models").symlink_to(options.models.resolve())
    load = os.getloadavg()[0]
    plan = run(command("plan", config, home, options), folder, [])
    peaks: list[tuple[float, float]] = []
    result = run(command("run", config, home, options), folder, peaks)
    return {
        "benchmark": "plan",
        "config": "tiny" if options.tiny else config,
        "set": options.set,
        "calibration": plan["calibration"],
        "stages": compare(plan, measured(result, home, peaks)),
        "total_seconds": {
            "estimate": plan["total"]["seconds"],
            "measured": round(result["seconds"], 1),
            "ratio": round(plan["total"]["seconds"] / result["seconds"], 3),
        },
        "accuracy": {
            name: [stage["metrics"][f"eval/greedy_{what}"] for what in ("accuracy", "low", "high")]
            for name, stage in result["stages"].items()
            if stage["kind"] == "evaluate"
        },
        "load": [round(load, 2), round(os.getloadavg()[0], 2)],
        "versions": {"torch": version("torch"), "transformers": version("transformers")},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?", default="quickstart", help="as for `posttrain run`")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C")
    parser.add_argument("--tiny", action="store_true", help="a tiny random model, in a minute")
    parser.add_argument("--models", type=Path, help="a home's folder `models`, not to convert anew")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = bench(Path(folder), options)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
