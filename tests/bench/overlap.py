"""Steps per hour with and without sampling next to the update; prints one JSON line.

The real command, flow and learner on a tiny model. A stand-in engine sleeps `--seconds` in every
call instead of computing, and a stand-in loss as long in every update: sampling and training of
equal length on separate resources, which two busy cores cannot show.

    python tests/bench/overlap.py --json [--seconds 1.0] [--steps 12]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

REPO = Path(__file__).resolve().parents[2]
if str(REPO) not in sys.path:
    sys.path.append(str(REPO))

from tests.helpers.learning import Budget, Learned, learning_config, make_model  # noqa: E402
from tests.helpers.pipeline import run_command, write_config  # noqa: E402

PLUGINS = '''
import threading
import time

from posttrain.core.contracts import PluginConfig
from posttrain.core.hooks import hookimpl
from posttrain.plugins.engines.transformers import TransformersEngine, TransformersEngineConfig
from posttrain.plugins.policy_losses.ppo_clip import PpoClipConfig, PpoClipLoss


SAMPLED = threading.Semaphore(0)
"""Rollouts without an update: the pages of a stage, which call its loss too, need not wait."""


class TimedEngineConfig(TransformersEngineConfig):
    """How long a call takes."""

    seconds: float = 1.0


class TimedEngine(TransformersEngine):
    """The transformers engine with a length of its own."""

    name = "timed"
    Config = TimedEngineConfig

    def generate(self, prompts, params):
        began = time.perf_counter()
        found = super().generate(prompts, params)
        time.sleep(max(0.0, self.config.seconds - (time.perf_counter() - began)))
        SAMPLED.release()
        return found


class TimedLossConfig(PpoClipConfig):
    """How long an update takes."""

    seconds: float = 1.0


class TimedLoss(PpoClipLoss):
    """The clipped loss, as long in each update, which is one micro-batch."""

    name = "timed"
    Config = TimedLossConfig

    def token_loss(self, *args, **kwargs):
        if SAMPLED.acquire(blocking=False):
            time.sleep(self.config.seconds)
        return super().token_loss(*args, **kwargs)


@hookimpl
def posttrain_register():
    return [TimedEngine, TimedLoss]
'''


def install(folder: Path) -> None:
    """The stand-ins as a package that an entry point offers."""
    info = folder / "timed-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: timed\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[posttrain.plugins]\ntimed = timed_stand_ins\n")
    (folder / "timed_stand_ins.py").write_text(PLUGINS)


SCHEDULES: dict[str, dict[str, Any]] = {
    "staleness0": {"max_staleness": 0},
    "staleness1": {"max_staleness": 1},
    "streaming": {"max_staleness": 1, "schedule": "streaming"},
}


def measure(
    folder: Path, seconds: float, steps: int, schedules: Sequence[str] = tuple(SCHEDULES)
) -> dict[str, Any]:
    """One pipeline run with a stage for each schedule; steps per hour of each, and how many times
    those of `staleness0`.
    """
    install(folder / "site")
    timed = {"policy_loss": {"name": "timed", "seconds": seconds}}
    budgets = {
        name: Budget(steps, {**timed, **SCHEDULES[name]}, preset="dr_grpo") for name in schedules
    }
    config = learning_config(make_model(folder, seed=0), budgets, seed=0)
    config["engine"] = {"name": "timed", "seconds": seconds}
    path = write_config(folder / "run.yaml", config)
    paths = [str(folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(paths)):
        done = run_command("run", str(path), "--home", str(folder / "home"), "--json", timeout=900)
    if done.code != 0:
        raise SystemExit(done.text[-3000:])
    learned = Learned(done.result)
    found: dict[str, Any] = {}
    for name in budgets:
        lengths = learned.history(name, "time/step_s")
        found[name] = {
            # The first step has no earlier update to be sampled in addition to.
            "steps_per_hour": round(3600 * len(lengths[1:]) / sum(lengths[1:])),
            "steps_per_hour_with_first": round(3600 * len(lengths) / sum(lengths)),
            "step_s": round(sum(lengths[1:]) / len(lengths[1:]), 3),
            "staleness_max": max(learned.history(name, "staleness/max")),
            "last_reward": round(learned.history(name, "reward/mean")[-1], 3),
        }
    speedups = {
        name: found[name]["steps_per_hour"] / found["staleness0"]["steps_per_hour"]
        for name in schedules
    }
    rates = {name: found[name]["steps_per_hour_with_first"] for name in schedules}
    return {
        "benchmark": "overlap",
        "seconds": seconds,
        "steps": steps,
        **found,
        "speedup": round(speedups["staleness1"], 3),
        "speedup_with_first": round(rates["staleness1"] / rates["staleness0"], 3),
        "streaming_speedup": round(speedups["streaming"], 3) if "streaming" in speedups else None,
        "load": round(os.getloadavg()[0], 2),
    }


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="of a rollout and of an update")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options.seconds, options.steps)
    print(json.dumps(found) if options.json else json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
