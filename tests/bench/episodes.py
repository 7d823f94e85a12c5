"""Wall time of 1,000 episodes at once, sound ones against a tenth that hangs and a tenth that
crashes; prints one JSON line.

    python tests/bench/episodes.py [--limit 0.5] [--repeats 5]

A hanging episode is cut off after `--limit` seconds of a step, which is what it costs. Both kinds
alternate; the ratio is of the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

REPO = Path(__file__).resolve().parents[2]
if str(REPO) not in sys.path:
    sys.path.append(str(REPO))

from tests.contract.test_live_episodes import PARAMS, Player, started  # noqa: E402


def measure(limit: float, repeats: int) -> dict[str, object]:
    """Seconds of each repeat, and the ratio of their medians."""
    params = replace(PARAMS, num_generations=1, max_tokens=12)
    sound = [f"game {n}" for n in range(1000)]
    faults = [f"{fault} at reset {n}" for fault in ("hang", "crash") for n in range(100)]
    mixed = [*sound[:800], *faults]
    seconds: dict[str, list[float]] = {"sound": [], "with faults": []}
    with tempfile.TemporaryDirectory() as folder:
        engine = started(Path(folder))
        for _ in range(repeats):
            for kind, keys in (("sound", sound), ("with faults", mixed)):
                began = time.perf_counter()
                groups = Player(engine, step_s=limit).play(keys, params)
                seconds[kind].append(round(time.perf_counter() - began, 2))
                failed = [any(c.failed for c in group.completions) for group in groups]
                assert not any(failed[:800]), "a sound episode was cut off: raise --limit"
                assert all(failed[800:]) == (kind != "sound")
        engine.close()
    return {
        "benchmark": "episodes",
        "limit_s": limit,
        "seconds": seconds,
        "ratio": round(median(seconds["with faults"]) / median(seconds["sound"]), 2),
        "load": round(os.getloadavg()[0], 2),
    }


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--limit", type=float, default=0.5, help="seconds of a step, at most")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(json.dumps(measure(options.limit, options.repeats)))


if __name__ == "__main__":
    main()
