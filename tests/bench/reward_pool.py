"""What the reward pool costs: samples per second, clean and with misbehaving rewards.

    python tests/bench/reward_pool.py [--json] [--samples 1000] [--workers 8] [--work-ms 40]

`overhead_us` is the time per sample of a reward that does nothing, sent through one worker.
`bound_s` is 1.3 times the clean run plus the timeouts divided by the workers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
if str(REPO) not in sys.path:
    sys.path.append(str(REPO))

from posttrain.core.rewards.pool import RewardPool  # noqa: E402
from tests.helpers.faulty_rewards import (  # noqa: E402
    NONSENSE,
    FaultyConfig,
    FaultyReward,
    samples_of,
)

KINDS = {"crash": ["exit", "segfault"], "hang": ["sleep", "regex"], "nonsense": [*NONSENSE]}


def timed(pool: RewardPool, texts: list[str]) -> float:
    """Seconds to score `texts`."""
    began = time.monotonic()
    pool.score(samples_of(texts))
    return time.monotonic() - began


def with_faults(count: int, share: float) -> tuple[list[str], int]:
    """Texts of which `share` each crash, hang and return nonsense, and how many hang."""
    texts = [str(place) for place in range(count)]
    each = int(share * count)
    places = random.Random(0).sample(range(count), 3 * each)
    for number, kinds in enumerate(KINDS.values()):
        for turn, place in enumerate(places[number * each : (number + 1) * each]):
            texts[place] = kinds[turn % len(kinds)]
    return texts, each


def measure(samples: int, workers: int, work_ms: float, timeout_s: float) -> dict[str, float]:
    """All figures."""
    figures: dict[str, float] = {"load": os.getloadavg()[0], "cores": float(os.cpu_count() or 1)}
    reward = FaultyReward(FaultyConfig(work_s=work_ms / 1000))
    began = time.monotonic()
    with RewardPool([reward], workers=workers, timeout_s=timeout_s) as pool:
        timed(pool, ["1"] * workers)
        figures["start_s"] = time.monotonic() - began
        figures["clean_s"] = timed(pool, [str(place) for place in range(samples)])
        texts, hanging = with_faults(samples, 0.05)
        figures["faulty_s"] = timed(pool, texts)
        figures["bound_s"] = 1.3 * figures["clean_s"] + hanging * timeout_s / workers
    with RewardPool([FaultyReward(FaultyConfig())], workers=1, timeout_s=timeout_s) as pool:
        timed(pool, ["1"])
        seconds = timed(pool, ["1"] * 5000)
        figures["overhead_us"] = 1e6 * seconds / 5000
        dead = timed(pool, ["exit"] * 50)
        figures["replacement_ms"] = 1000 * dead / 50
    figures["clean_samples_per_s"] = samples / figures["clean_s"]
    figures["faulty_samples_per_s"] = samples / figures["faulty_s"]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--work-ms", type=float, default=40.0)
    parser.add_argument("--timeout-s", type=float, default=0.3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = measure(options.samples, options.workers, options.work_ms, options.timeout_s)
    if options.json:
        print(json.dumps({name: round(value, 3) for name, value in figures.items()}))
        return
    for name, value in figures.items():
        print(f"{name:22} {value:10.2f}")


if __name__ == "__main__":
    main()
