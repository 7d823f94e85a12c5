"""What pools on the nodes of a Ray cluster cost, against the same in this process.

    python tests/bench/node_pools.py [--json] [--samples 5000] [--calls 1000] [--wait-s 0.5]

Two nodes of this machine with one CPU each. `empty` is a reward that does nothing, `work` one that
takes 20 ms; `round_trip_ms` is one item to a node and back; `bytes_a_sample` is what travels to a
node. `threads` are those of this process, `one_by_one_s` is computed from ten calls.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
if str(REPO) not in sys.path:
    sys.path.append(str(REPO))

from posttrain.core.rewards.pool import RewardPool  # noqa: E402
from tests.contract.test_environment_nodes import called, here  # noqa: E402
from tests.contract.test_environment_nodes import on_nodes as answers_on_nodes  # noqa: E402
from tests.contract.test_score_pools import on_nodes  # noqa: E402
from tests.helpers.faulty_rewards import FaultyConfig, FaultyReward, samples_of  # noqa: E402
from tests.helpers.node_tools import Single  # noqa: E402
from tests.helpers.two_nodes import joined, two_nodes  # noqa: E402


def seconds(function: Callable[[], object], rounds: int = 3) -> float:
    """The shortest of `rounds` times."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return min(times)


def rewards(count: int) -> dict[str, float]:
    """Samples per second of the local pool with two workers, and of two nodes with one each."""
    figures = {}
    for name, work_s, number in (("empty", 0.0, count), ("work", 0.02, max(1, count // 20))):
        samples = samples_of([str(place) for place in range(number)])

        def pool(work_s: float = work_s) -> RewardPool:
            return RewardPool([FaultyReward(FaultyConfig(work_s=work_s))], workers=2)

        with pool() as local, on_nodes(pool(), []) as nodes:
            for place, scorer in (("here", local), ("nodes", nodes)):
                scorer.score(samples_of(["1"] * 64))
                taken = seconds(lambda s=scorer, x=samples: s.score(x))
                figures[f"{name}_samples_per_s_{place}"] = number / taken
            one = samples_of(["1"])
            figures["round_trip_ms"] = 1000 * seconds(lambda n=nodes, x=one: n.score(x), 20)
            figures["here_ms"] = 1000 * seconds(lambda n=local, x=one: n.score(x), 20)
    figures["bytes_a_sample"] = len(pickle.dumps(samples, protocol=5)) / len(samples)
    return figures


def calls(count: int, wait_s: float) -> dict[str, float]:
    """Seconds for `count` calls of a tool that waits, and milliseconds of one that does not."""
    steps = called([str(number) for number in range(count)])
    figures = {
        "one_by_one_s": count
        / 10
        * seconds(lambda: here(Single, seconds=wait_s).to(called(["1"] * 10, "single")), 1)
    }
    local = here(seconds=wait_s)
    figures["threads_s"] = seconds(lambda: local.to(steps))
    with answers_on_nodes(local, []) as nodes:
        figures["nodes_s"] = seconds(lambda: nodes.to(steps))
    quick, single = here(), here(Single)
    with answers_on_nodes(quick, []) as nodes:
        one, many = called(["1"]), called(["1"] * 1000)
        figures["call_round_trip_ms"] = 1000 * seconds(lambda: nodes.to(one), 20)
        figures["call_of_many_ms"] = seconds(lambda: nodes.to(many), 5)
        figures["call_here_ms"] = seconds(lambda: single.to(called(["1"] * 1000, "single")), 5)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--wait-s", type=float, default=0.5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = {"load": os.getloadavg()[0], "cores": float(os.cpu_count() or 1)}
    with tempfile.TemporaryDirectory() as folder, two_nodes(Path(folder)) as cluster:
        with joined(cluster):
            figures |= rewards(options.samples) | calls(options.calls, options.wait_s)
    if options.json:
        print(json.dumps({name: round(value, 3) for name, value in figures.items()}))
        return
    for name, value in figures.items():
        print(f"{name:26} {value:10.2f}")


if __name__ == "__main__":
    main()
