"""Do rankings on frozen rollouts come true? Predictions of `compare --frozen` against real runs.

From each start (a tiny model, trained for some steps) one policy is sampled without learning, the
real command ranks variants on these rollouts, and every variant trains from the same start several
times. A pair of variants is a hit if the one predicted to learn faster has more reward, on average
over the steps and the repetitions. Prints one JSON line.

python tests/bench/frozen_predictions.py                          # 3 seeds, 2 starts each
python tests/bench/frozen_predictions.py --seeds 0 --starts 20 --repeats 1
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from itertools import combinations
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
if str(REPO) not in sys.path:
    sys.path.append(str(REPO))

from tests.helpers.learning import run  # noqa: E402
from tests.helpers.length_toy import length_config  # noqa: E402
from tests.helpers.pipeline import run_command  # noqa: E402

# The run's own is rloo with token-mean.
VARIANTS: dict[str, dict[str, Any]] = {
    "as run": {},
    "aggregation seq-mean-token-mean": {"aggregator": "seq-mean-token-mean"},
    "aggregation prompt-mean": {"aggregator": "prompt-mean"},
    "advantage grpo": {"advantage": "grpo"},
    "advantage opo": {"advantage": "opo"},
    "advantage raw": {"advantage": "raw"},
    "advantage max_rl": {"advantage": "max_rl"},
}
OWN = {"aggregator": "token-mean", "advantage": "rloo"}
POOL = 40


def stages(start: int, steps: int, repeats: int) -> dict[str, dict[str, Any]]:
    """The start, the pool of its rollouts, and every variant from there."""
    frozen = {"optimizer": {"learning_rate": 1e-12}, "steps": POOL}
    origin: dict[str, Any] = {"inputs": {"model": "start" if start else "base"}}
    found: dict[str, dict[str, Any]] = {"start": {**OWN, "steps": start}} if start else {}
    found["pool"] = {**OWN, **origin, **frozen}
    for number, fields in enumerate(VARIANTS.values()):
        for repeat in range(repeats):
            found[f"v{number}_{repeat}"] = {**OWN, **origin, "steps": steps, **fields}
    return found


def one_start(
    folder: Path, seed: int, start: int, steps: int, repeats: int
) -> list[dict[str, Any]]:
    """Each pair of variants: what was predicted, and what came of it."""
    done = run(folder, length_config(folder, seed, stages(start, steps, repeats)))
    options: list[str] = []
    for label in list(VARIANTS)[1:]:
        kind, _, name = label.partition(" ")
        options += [f"--{kind}", name]
    ranked = run_command(
        *("compare", done.result["run_id"], "--frozen", "--stage", "pool", "--json"),
        *("--pool", str(POOL), "--home", str(folder / "home"), *options),
        timeout=900,
    )
    if ranked.code != 0:
        raise SystemExit(ranked.text[-3000:])
    means = {
        label: [
            statistics.mean(done.history(f"v{number}_{repeat}", "reward/mean"))
            for repeat in range(repeats)
        ]
        for number, label in enumerate(VARIANTS)
    }
    predicted = {frozenset((p["first"], p["second"])): p for p in ranked.result["predictions"]}
    pairs = []
    for a, b in combinations(VARIANTS, 2):
        p = predicted[frozenset((a, b))]
        sign = 1 if p["first"] == a else -1
        pairs.append(
            {
                "seed": seed,
                "start": start,
                "first": a,
                "second": b,
                "gain": sign * p["gain"],
                "shown": p["verdict"] != "no difference seen",
                "reward": statistics.mean(means[b]) - statistics.mean(means[a]),
                "error": ((statistics.variance(means[a]) + statistics.variance(means[b])) / repeats)
                ** 0.5
                if repeats > 1
                else None,
            }
        )
    print(json.dumps({"seed": seed, "start": start, "reward": means}), file=sys.stderr)
    return pairs


def rate(pairs: list[dict[str, Any]], draws: int = 2000) -> dict[str, float | int | None]:
    """Share of hits, with its 95 % interval by drawing starts again: pairs of a start hang
    together."""

    def share(several: list[dict[str, Any]]) -> float | None:
        hits = [(p["gain"] > 0) == (p["reward"] > 0) for p in several]
        return sum(hits) / len(hits) if hits else None

    starts = sorted({(p["seed"], p["start"]) for p in pairs})
    by_start = {s: [p for p in pairs if (p["seed"], p["start"]) == s] for s in starts}
    draw, found = random.Random(0), []
    for _ in range(draws if starts else 0):
        again = [p for s in draw.choices(starts, k=len(starts)) for p in by_start[s]]
        if (value := share(again)) is not None:
            found.append(value)
    found.sort()
    return {
        "pairs": len(pairs),
        "rate": share(pairs),
        "low": found[int(0.025 * len(found))] if found else None,
        "high": found[int(0.975 * len(found))] if found else None,
    }


def main() -> None:
    """All starts, one after another."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--starts", nargs="*", type=int, default=[6, 20], help="steps before")
    parser.add_argument("--steps", type=int, default=25, help="of each real run")
    parser.add_argument("--repeats", type=int, default=2, help="real runs of each variant")
    parser.add_argument("--pairs", type=Path, help="write every pair into this file")
    options = parser.parse_args()
    pairs: list[dict[str, Any]] = []
    for seed in options.seeds:
        for start in options.starts:
            with tempfile.TemporaryDirectory() as folder:
                pairs += one_start(Path(folder), seed, start, options.steps, options.repeats)
            if options.pairs:
                options.pairs.write_text(json.dumps(pairs))
    clear = [p for p in pairs if p["error"] and abs(p["reward"]) > 2 * p["error"]]
    print(
        json.dumps(
            {
                "all": rate(pairs),
                "predicted": rate([p for p in pairs if p["shown"]]),
                "predicted, gain above 0.02": rate(
                    [p for p in pairs if p["shown"] and abs(p["gain"]) > 0.02]
                ),
                "predicted, and the runs differ by 2 s.e.": rate([p for p in clear if p["shown"]]),
            }
        )
    )


if __name__ == "__main__":
    main()
