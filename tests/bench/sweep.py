"""What a sweep costs beyond its stages: wall time against what was computed; one JSON line.

Variants share an SFT stage and differ in the learning rate of RL. The ratio counts everything: the
start of the process, Prefect, MLflow, reuse of shared stages, the report.

    python tests/bench/sweep.py [--variants 8] [--seeds 3] [--rl-steps 60]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import yaml

REPO = Path(__file__).resolve().parents[2]
if str(REPO) not in sys.path:
    sys.path.append(str(REPO))

from posttrain.core.kit.tiny import make_tiny_model  # noqa: E402
from tests.helpers.pipeline import tiny_config  # noqa: E402


def write_sweep(folder: Path, variants: int, seeds: int, rl_steps: int) -> Path:
    """A config whose variants share their SFT."""
    config = tiny_config(make_tiny_model(folder / "model"))
    stages = config["stages"]
    stages["sft"] |= {"steps": 100}
    stages["rl"] |= {"inputs": {"model": "sft"}, "rewards": ["accuracy"], "steps": rl_steps}
    stages["rl"] |= {"checkpoint_every": 0, "evaluate_every": 0}
    stages["evaluate"]["inputs"] = {"model": "rl"}
    config["stages"] = {name: stages[name] for name in ("sft", "rl", "evaluate")}
    rates = [1e-4 * (number + 1) for number in range(variants)]
    grid = {"stages.rl.optimizer.learning_rate": rates}
    config["variants"] = {"seeds": list(range(seeds)), "grid": grid}
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def measure(variants: int, seeds: int, rl_steps: int) -> dict[str, object]:
    """Run the sweep, and compare its wall time with what was computed."""
    with tempfile.TemporaryDirectory() as name:
        path = write_sweep(Path(name), variants, seeds, rl_steps)
        command = [sys.executable, "-m", "posttrain.pipelines.cli", "sweep", str(path)]
        began = time.perf_counter()
        done = subprocess.run(
            [*command, "--home", f"{name}/home", "--json"], capture_output=True, text=True
        )
        wall = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    result = json.loads(done.stdout.splitlines()[-1])
    computed = result["seconds"]["computed"]
    ran = Counter(stage for run in result["runs"] for stage in run["computed"])
    return {
        "variants": variants,
        "seeds": seeds,
        "rl_steps": rl_steps,
        "stages_computed": dict(ran),
        "computed_s": round(computed, 1),
        "wall_s": round(wall, 1),
        "ratio": round(wall / computed, 3),
        "overhead_s_a_run": round((wall - computed) / len(result["runs"]), 2),
        "load": round(os.getloadavg()[0], 1),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variants", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rl-steps", type=int, default=60)
    given = parser.parse_args()
    print(json.dumps(measure(given.variants, given.seeds, given.rl_steps)))


if __name__ == "__main__":
    main()
