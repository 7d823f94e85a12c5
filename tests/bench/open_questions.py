"""Runs behind docs/open-questions.md: aggregation modes and clipping on the task of lengths.

A tiny random model, 40 steps, three seeds, each variant from the same weights. `speed` is the mean
reward over all steps, `final` over the last five; both with the t-interval of the difference to the
first of its kind, paired by seed. Prints one JSON line.

python tests/bench/open_questions.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from scipy import stats

REPO = Path(__file__).resolve().parents[2]
if str(REPO) not in sys.path:
    sys.path.append(str(REPO))

from tests.helpers.learning import Learned, final, run  # noqa: E402
from tests.helpers.length_toy import length_config  # noqa: E402

ON_POLICY = {"num_mini_batches": 1, "aggregator": "token-mean"}
SEVERAL = {"num_mini_batches": 3, "epochs": 2, "aggregator": "token-mean"}
KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "aggregation": {
        "token_mean": {**ON_POLICY, "policy_loss": "ppo_clip"},
        "seq_mean_token_mean": {"policy_loss": "ppo_clip", "aggregator": "seq-mean-token-mean"},
        "prompt_mean": {"policy_loss": "ppo_clip", "aggregator": "prompt-mean"},
    },
    "clip, six updates per batch": {
        "clipped": {**SEVERAL, "policy_loss": "ppo_clip"},
        "unclipped": {**SEVERAL, "policy_loss": "importance_pg"},
    },
}


def measured(done: Learned, name: str) -> dict[str, float]:
    """What the page says of a run."""
    rewards = done.history(name, "reward/mean")
    slopes = done.history(name, "token_weight/length_slope")
    found = {
        "speed": statistics.mean(rewards),
        "final": final(rewards),
        "length": final(done.history(name, "resp_len/mean")),
        "length_slope": statistics.median(slopes),
        "grad_norm": statistics.median(done.history(name, "grad/norm")),
    }
    clipped = done.history(name, "clip/frac")
    return found | ({"clip_frac": statistics.mean(clipped)} if clipped else {})


def difference(first: list[float], second: list[float]) -> dict[str, float]:
    """Second less first, paired by seed, with its 95 % t-interval."""
    gaps = [b - a for a, b in zip(first, second, strict=True)]
    mean = statistics.mean(gaps)
    if len(gaps) < 2:
        return {"mean": round(mean, 3)}
    width = float(stats.t.ppf(0.975, len(gaps) - 1)) * statistics.stdev(gaps) / len(gaps) ** 0.5
    low, high = mean - width, mean + width
    return {"mean": round(mean, 3), "low": round(low, 3), "high": round(high, 3)}


def main() -> None:
    """All variants of a seed in one run, seed by seed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    stages = {
        name: {**fields, "steps": options.steps, "optimizer": {"learning_rate": 3.0e-3}}
        for variants in KINDS.values()
        for name, fields in variants.items()
    }
    runs: list[dict[str, dict[str, float]]] = []
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            done = run(Path(folder), length_config(Path(folder), seed, stages))
            runs.append({name: measured(done, name) for name in stages})
        print(json.dumps({"seed": seed, **runs[-1]}), file=sys.stderr)
    report: dict[str, Any] = {}
    for kind, variants in KINDS.items():
        own = next(iter(variants))
        for name in variants:
            row: dict[str, Any] = {
                key: [round(seed[name][key], 3) for seed in runs] for key in runs[0][name]
            }
            if name != own:
                for key in ("speed", "final"):
                    row[f"{key}, less {own}"] = difference(
                        [seed[own][key] for seed in runs], [seed[name][key] for seed in runs]
                    )
            report[f"{kind}: {name}"] = row
    print(json.dumps(report))


if __name__ == "__main__":
    main()
