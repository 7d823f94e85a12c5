"""Is `posttrain plan` right? Plans a run, does it, and compares; prints one JSON line.

For each stage the line has the estimated and the measured seconds and their ratio, and the disk
that it left; for the run the seconds and the peak memory of its process. `accuracy` is what the
evaluations found, with its interval: the same run shows whether it learned.

    python tests/bench/plan.py quickstart --set stages.rl.steps=4 --set engine=transformers
    python tests/bench/plan.py --tiny
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
if str(REPO) not in sys.path:
    sys.path.append(str(REPO))

from posttrain.core.kit.tiny import make_tiny_model  # noqa: E402
from tests.helpers.pipeline import COMMAND, prepared, tiny_config, write_config  # noqa: E402


def run(arguments: list[str]) -> tuple[dict[str, Any], float]:
    """The JSON object that a command ends with, and the peak memory of its process, GB."""
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(arguments, stdout=out, stderr=sys.stderr, env=env)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        lines = out.read().strip().splitlines()
    if process.returncode or not lines:
        raise SystemExit(f"code {process.returncode}: {lines[-1:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found, usage.ru_maxrss * 1024 / 1e9


def compared(estimate: float, measured: float) -> dict[str, float]:
    """Both, and estimate / measured."""
    ratio = estimate / measured if measured else 1.0
    return {name: round(value, 3) for name, value in locals().items()}


def bench(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Plan, run, compare."""
    config, home = options.config, prepared(folder / "home")
    if options.tiny:
        model = make_tiny_model(folder / "model")
        config = str(write_config(folder / "tiny.yaml", tiny_config(model)))
    if options.models is not None:  # the bundled model, converted by an earlier run
        (home / "models").symlink_to(options.models.resolve())
    sets = [word for one in options.set for word in ("--set", one)]
    common = [config, *sets, "--home", str(home), "--json"]
    plan, _ = run([*COMMAND, "plan", *common])
    result, peak = run([*COMMAND, "run", *common])
    stages: dict[str, Any] = {}
    for row in plan["stages"]:
        name = row["stage"]
        artifacts = next((home / "artifacts").glob(f"{name}-*"))
        size = sum(path.stat().st_size for path in artifacts.rglob("*") if path.is_file())
        stages[name] = {
            "seconds": compared(row["seconds"], result["stages"][name]["seconds"]),
            "disk_gb": compared(row["disk_gb"], size / 1e9),
        }
    return {
        "benchmark": "plan",
        "config": "tiny" if options.tiny else config,
        "set": options.set,
        "calibration": plan["calibration"],
        "stages": stages,
        "seconds": compared(plan["total"]["seconds"], result["seconds"]),
        "memory_gb": compared(plan["total"]["memory_gb"], peak),
        "accuracy": {
            name: [stage["metrics"][f"eval/greedy_{what}"] for what in ("accuracy", "low", "high")]
            for name, stage in result["stages"].items()
            if stage["kind"] == "evaluate"
        },
        "load": os.getloadavg()[0],
    }


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?", default="quickstart", help="as for `posttrain run`")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C")
    parser.add_argument("--tiny", action="store_true", help="a tiny random model, in a minute")
    parser.add_argument("--models", type=Path, help="a home's folder `models`, already converted")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(bench(Path(folder), options)))


if __name__ == "__main__":
    main()
