"""Random kills over many short runs on a cluster of this machine: wrong, hung, left behind.

    python tests/bench/cluster_kills.py [--json] [--kills 200] [--runs 6] [--minutes 40] [--seed 0]

`--kills`: of ranks, in groups that train a tiny model; they come by killing one rank or several at
once, by SIGTERM, or with a raylet or a whole node. `--runs`: whole runs (`posttrain run`) in
addition, each struck once. Weights are compared with those of an undisturbed run: bit for bit where
the number of ranks was kept, else to 1e-9.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

REPO = Path(__file__).resolve().parents[2]
if str(REPO) not in sys.path:
    sys.path.append(str(REPO))

from posttrain.core.kit.tiny import make_tiny_model  # noqa: E402
from tests.helpers.cluster import RANKS, Cluster, running_cluster  # noqa: E402
from tests.helpers.faults import joined  # noqa: E402
from tests.helpers.kills import Tally, struck_run, undisturbed  # noqa: E402
from tests.helpers.pipeline import (  # noqa: E402
    prepared,
    run_command,
    tiny_config,
    write_config,
)


def groups(cluster: Cluster, folder: Path, kills: int, minutes: float, seed: int) -> Tally:
    """Groups of ranks, until that many were killed or the time is over."""
    tally, end = Tally(), time.monotonic() + 60 * minutes
    with joined(cluster.address, cluster.token):
        wanted = undisturbed()
        while tally.killed < kills and time.monotonic() < end:
            number = seed + tally.runs
            count = random.Random(number).randint(2, 5)
            struck_run(cluster, folder / f"run-{number}", number, count, wanted, tally)
            print(
                f"{tally.killed:4} killed in {tally.runs} runs: {tally.wrong} wrong, "
                f"{tally.hung} hung, {tally.errors}",
                file=sys.stderr,
                flush=True,
            )
    return tally


def products(cluster: Cluster, folder: Path, count: int, seed: int) -> dict[str, Any]:
    """Whole runs; what is killed is a rank, a node, or the run itself, which is then repeated."""
    made: dict[str, Any] = tiny_config(make_tiny_model(folder / "model"))
    rl = made["stages"]["rl"] | {
        "inputs": {"model": "base"},
        "rewards": ["accuracy"],
        "steps": 10,
        "checkpoint_every": 2,
        "evaluate_every": 0,
    }
    config = write_config(folder / "run.yaml", made | {"stages": {"rl": rl}})
    home = prepared(folder / "undisturbed")
    wanted = _weights(run_command("run", str(config), *RANKS, "--home", str(home), "--json").result)
    found: dict[str, Any] = {"runs": 0, "wrong": 0, "hung": 0, "struck": []}
    for number in range(count):
        draw = random.Random(seed + number)
        kind = ("rank", "run", "node")[number % 3]
        home = folder / f"product-{number}"
        process = cluster.start(config, home)
        time.sleep(draw.uniform(0.0, 3.0))
        ranks = cluster.actors()
        if kind == "run":
            os.killpg(process.pid, signal.SIGKILL)
        elif kind == "rank" and ranks:
            draw.choice(ranks).kill()
        elif ranks:
            cluster.end_node(max(cluster.node_of(rank) for rank in ranks))
        out, _ = process.communicate(timeout=300)
        if kind == "run":
            psutil.wait_procs(ranks, timeout=30)
            given = (*cluster.given, "--home", str(home), "--json")
            out = run_command("run", str(config), *given, variables=cluster.variables).text
        result = next(json.loads(x) for x in reversed(out.splitlines()) if x.startswith("{"))
        found["runs"] += 1
        found["wrong"] += result["status"] != "completed" or _weights(result) != wanted
        found["struck"].append(kind if ranks else "nothing")
        print(found, file=sys.stderr, flush=True)
        cluster.up()
    return found


def _weights(result: dict[str, Any]) -> str:
    made = result["stages"]["rl"]["artifacts"]
    return str(next(a["digest"] for a in made if a["kind"] == "model"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.monotonic()
    found: dict[str, Any] = {"seed": options.seed}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # It fails where a process of the cluster is left behind.
        with running_cluster(folder / "home", nodes=3, cpus=2) as cluster:
            tally = groups(cluster, folder, options.kills, options.minutes, options.seed)
            found["groups"] = asdict(tally) | {"strikes": dict(tally.strikes)}
            seconds = found["groups"].pop("seconds")
            found["groups"]["median_run_s"] = statistics.median(seconds or [0.0])
            found["actors_left"] = len(cluster.actors())
        if options.runs:
            with running_cluster(folder / "whole", nodes=3) as cluster:
                found["products"] = products(cluster, folder, options.runs, options.seed)
    found["minutes"] = (time.monotonic() - began) / 60
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:12} {value}")


if __name__ == "__main__":
    main()
