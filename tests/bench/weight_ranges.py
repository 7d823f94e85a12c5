"""The ranges of token weights in runs that learned, and in runs that did not.

Trains a tiny random model with several presets on three seeds, on two tasks: `digits` (all answers
have two tokens) and `lengths` (answers of one to six tokens). A run is healthy if the mean reward
of its last five steps reaches 0.9 on `digits`, or half as much again as that of its first ten steps
on `lengths`. Prints a table: median [5 %, 95 %] over the steps of all seeds.

python tests/bench/weight_ranges.py                        # both tasks, three seeds
python tests/bench/weight_ranges.py --tasks lengths --seeds 0 --rate 0.1   # learning rate too high
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
if str(REPO) not in sys.path:
    sys.path.append(str(REPO))

from tests.helpers.learning import (  # noqa: E402
    BUDGETS,
    REACHED,
    Learned,
    final,
    learning_config,
    make_model,
    named,
    run,
)
from tests.helpers.length_toy import length_config  # noqa: E402

PRESETS = ("reinforce", "rloo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "ppo")
SHOWN = (
    "peak",
    "p99",
    "p50",
    "effective_frac",
    "zero_frac",
    "length_slope",
    "share/positive",
    "share/bounded",
    "share/long",
    "share/late",
)


def digits(folder: Path, seed: int, presets: Sequence[str], rate: float | None) -> Learned:
    """The runs of tests/e2e/test_presets_learn.py."""
    budgets = {name: BUDGETS[name] for name in presets}
    config = learning_config(make_model(folder, seed), budgets, seed)
    return run(folder, with_rate(config, rate))


def lengths(folder: Path, seed: int, presets: Sequence[str], rate: float | None) -> Learned:
    """The same presets where answers differ in length; three updates on each batch."""
    stages: dict[str, dict[str, Any]] = {}
    for name in presets:
        fields = {**BUDGETS[name].fields}
        fields.pop("sampler", None)
        stages[name] = {
            "algorithm": name,
            "advantage": None,
            "num_mini_batches": 3,
            "steps": 60,
            "optimizer": {"learning_rate": 2.0e-3},
            **named(fields, name),
        }
        if name == "dapo":
            stages[name] |= {"sampler": "group", "rewards": ["accuracy"]}
    config = length_config(folder, seed, stages)
    for stage in config["stages"].values():
        if stage["advantage"] is None:
            del stage["advantage"]
    return run(folder, with_rate(config, rate))


def with_rate(config: dict[str, Any], rate: float | None) -> dict[str, Any]:
    """The config with another learning rate in every stage."""
    for stage in config["stages"].values():
        if rate is not None:
            stage["optimizer"] = {"learning_rate": rate}
    return config


def learned_enough(task: str, rewards: Sequence[float]) -> bool:
    """Whether a run counts as healthy."""
    if task == "digits":
        return final(rewards) >= REACHED
    return final(rewards) >= 1.5 * statistics.mean(rewards[:10])


def spread(values: Sequence[float]) -> str:
    """Median and the middle nine tenths."""
    if not values:
        return "-"
    ordered = sorted(values)
    low, high = (ordered[round(q * (len(ordered) - 1))] for q in (0.05, 0.95))
    return f"{statistics.median(ordered):.3g} [{low:.3g}, {high:.3g}]"


def main() -> None:
    """Train, and print a table for each task."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", nargs="*", default=["digits", "lengths"])
    parser.add_argument("--presets", nargs="*", default=list(PRESETS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--rate", type=float, help="learning rate of every run")
    parser.add_argument("--out", type=Path, help="write every value into this file, as JSON")
    options = parser.parse_args()
    kept: dict[str, Any] = {}
    for task in options.tasks:
        runs = []
        for seed in options.seeds:
            with tempfile.TemporaryDirectory() as folder:
                make = digits if task == "digits" else lengths
                done = make(Path(folder), seed, options.presets, options.rate)
                runs.append({name: read(done, name) for name in options.presets})
        kept[task] = runs
        print_table(task, options.presets, runs)
    if options.out:
        options.out.write_text(json.dumps(kept))


def read(done: Learned, name: str) -> dict[str, list[float]]:
    """Every curve of a stage that the table needs."""
    metric = BUDGETS[name].metric if name != "dapo" else "reward/mean"
    curves = {"reward": done.history(name, metric)}
    return curves | {key: done.history(name, f"token_weight/{key}") for key in SHOWN}


def print_table(
    task: str, presets: Sequence[str], runs: Sequence[dict[str, dict[str, list[float]]]]
) -> None:
    """A row for each preset: of its healthy runs, unless it has none."""
    print(f"\n{task}: median [5 %, 95 %] over steps and seeds\n")
    print("| preset | healthy | reward, first and last | " + " | ".join(SHOWN) + " |")
    print("|" + "---|" * (len(SHOWN) + 3))
    for name in presets:
        healthy = [seed[name] for seed in runs if learned_enough(task, seed[name]["reward"])]
        rows = healthy or [seed[name] for seed in runs]
        first = statistics.mean(final(row["reward"][:5]) for row in rows)
        last = statistics.mean(final(row["reward"]) for row in rows)
        cells = [spread([v for row in rows for v in row[key]]) for key in SHOWN]
        shown = f"{len(healthy)} of {len(runs)} | {first:.2f}, {last:.2f}"
        print(f"| {name} | {shown} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
