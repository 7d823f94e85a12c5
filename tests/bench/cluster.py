"""What Ray costs and how soon faults are noticed, on a cluster of this machine.

    python tests/bench/cluster.py [--json] [--only calls bytes faults] [--nodes 4] [--actors 1 8 32]

`calls`: a call to all ranks, which compute nothing, until all have answered, which is what a
step pays for each of its calls; `cpu_ms` is what it takes of this process, `least_ms` the call that
the rest of a busy machine disturbed least. `bytes`: seconds for a batch to all ranks, and for
weights from rank 0 to this process; `in_node_mb` is what entered the object store of each node.
`faults`: seconds until the caller has the error, and until it has ranks again.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import platform
import pstats
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil

REPO = Path(__file__).resolve().parents[2]
if str(REPO) not in sys.path:
    sys.path.append(str(REPO))

import ray  # noqa: E402

from posttrain.core.cluster.group import Answerer  # noqa: E402
from posttrain.core.cluster.on_ray import ranks as on_ray  # noqa: E402
from posttrain.core.cluster.on_ray.connection import nodes  # noqa: E402
from posttrain.core.errors import ResourceError  # noqa: E402
from tests.helpers.cluster import Cluster, gone, running_cluster  # noqa: E402
from tests.helpers.faults import joined, ranks_of, struck, two_machines  # noqa: E402
from tests.helpers.network import can_cut  # noqa: E402
from tests.helpers.ranks import nothing  # noqa: E402

Row = dict[str, Any]


class EchoActor(on_ray.RankActor):
    """A rank that needs no torch: 32 of them fit on a small machine."""

    def open_store(self, size: int) -> tuple[str, int]:
        return "", 0

    def meet(self, rank: int, size: int, host: str, port: int, peer_timeout_s: float) -> None:
        from tests.helpers.echo_worker import build

        self._answerer = Answerer(build, rank)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class EchoRanks(on_ray.RayRanks):
    """A group of them, called as any other."""

    actor_class = EchoActor


def echoes(size: int) -> EchoRanks:
    resources = on_ray.RankResources(cpus=1, gpus=0, least=size, start_timeout_s=120)
    made = EchoRanks(size, "tests.helpers.echo_worker", {}, resources)
    made.start(None, nothing)
    return made


def machine() -> Row:
    """Where the figures are from."""
    names = [line for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "cpu": names[0].partition(":")[2].strip() if names else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "ray": ray.__version__,
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def calls(sizes: list[int], profile: bool) -> list[Row]:
    """Milliseconds of a call to all ranks, empty and with a small argument."""
    rows = []
    for size in sizes:
        began = time.monotonic()
        group = echoes(size)
        started_s = time.monotonic() - began
        for name, args in (("nothing", ()), ("take", (b"x" * 1_000_000,))):
            call = partial(group.call, name, *args, check=nothing)
            for _ in range(10):
                call()
            cpu = time.process_time()
            taken = sorted(1e3 * _timed(call) for _ in range(100))
            cpu = time.process_time() - cpu
            rows.append(
                {
                    "actors": size,
                    "argument": "none" if name == "nothing" else "1 MB",
                    "least_ms": taken[0],
                    "median_ms": statistics.median(taken),
                    "p99_ms": taken[-2],
                    "cpu_ms": 1e3 * cpu / len(taken),
                    "start_s": started_s,
                }
            )
        if profile and size == max(sizes):
            _profile(partial(group.call, "nothing", check=nothing))
        group.close()
    return rows


def _profile(call: Callable[[], object]) -> None:
    profiler = cProfile.Profile()
    with profiler:
        for _ in range(200):
            call()
    pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(15)


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def stored_mb() -> list[float]:
    """Megabytes that were ever made in the object store of each node."""
    from ray._private.internal_api import node_stats

    return [
        node_stats(
            node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False
        ).store_stats.cumulative_created_bytes
        / 1e6
        for node in sorted(ray.nodes(), key=lambda one: str(one["NodeID"]))
        if node["Alive"]
    ]


def transfers(sizes: list[int], megabytes: int) -> list[Row]:
    """A batch to all ranks; weights from rank 0 to here, and from here to receivers."""
    import numpy as np

    data, rows = np.ones(megabytes * 1_000_000, dtype=np.uint8), []
    for size in sizes:
        group = echoes(size)
        for what, move in (
            ("batch to ranks", partial(group.call, "take", data, check=nothing)),
            ("weights of rank 0 to the run", partial(group.call, "give", data.size, check=nothing)),
        ):
            move()
            before = stored_mb()
            taken = sorted(_timed(move) for _ in range(3))
            time.sleep(0.5)
            entered = [(b - a) / 3 for a, b in zip(before, stored_mb(), strict=True)]
            rows.append(
                {
                    "what": what,
                    "receivers": size if "batch" in what else 1,
                    "actors": size,
                    "mb": megabytes,
                    "seconds": taken[1],
                    "in_node_mb": [round(one, 1) for one in entered],
                }
            )
        group.close()
    return rows


def faults(cluster: Cluster, folder: Path) -> list[Row]:
    """Each fault that the documentation names, in a group of two."""
    rows: list[Row] = []

    def measure(name: str, fault: Callable[[], object], **limits: float) -> None:
        with joined(cluster.address, cluster.token):
            group = ranks_of(2, **limits)
            error, seen = struck(fault, group)
            row = {"fault": name, "seen_s": seen, "error": type(error).__name__, "again_s": None}
            if not isinstance(error, ResourceError):
                began = time.monotonic()
                again = ranks_of(2)
                row |= {"again_s": time.monotonic() - began, "ranks": again.size}
                again.close()
            group.close()
        rows.append(row)

    measure("rank killed", lambda: cluster.actors()[1].kill())
    measure(
        "rank hangs (peer_timeout_s: 20)",
        lambda: cluster.actors()[1].send_signal(signal.SIGSTOP),
        peer_timeout_s=20.0,
    )
    measure("node ended, a spare there", lambda: _end_other(cluster))
    measure("node ended, no spare", lambda: _end_other(cluster))
    cluster.up()
    measure("head ended", lambda: cluster.end_node(0))
    cluster.up()
    rows.append(_no_room(cluster))
    rows.append(_driver(cluster))
    if can_cut():
        with two_machines(folder) as pair, joined(pair.address, pair.token):
            error, seen = struck(pair.cut, ranks_of(2))
            began = time.monotonic()
            alone = ranks_of(2)
            rows.append(
                {
                    "fault": "link cut without a word",
                    "seen_s": seen,
                    "error": type(error).__name__,
                    "again_s": time.monotonic() - began,
                    "ranks": alone.size,
                }
            )
            alone.close()
    return rows


def _end_other(cluster: Cluster) -> None:
    cluster.end_node(max(cluster.node_of(rank) for rank in cluster.actors()))


def _no_room(cluster: Cluster) -> Row:
    with joined(cluster.address, cluster.token):
        began = time.monotonic()
        try:
            ranks_of(50, least=50, start_timeout_s=3.0)
        except ResourceError as error:
            seen, kind = time.monotonic() - began, type(error).__name__
    return {"fault": "no room (start_timeout_s: 3)", "seen_s": seen, "error": kind, "again_s": None}


def _driver(cluster: Cluster) -> Row:
    """A process that owns ranks is killed; seconds until they are gone."""
    script = (
        f"import sys; sys.path.append({str(REPO)!r})\n"
        "import pathlib, time\nfrom tests.helpers.faults import joined, ranks_of\n"
        f"with joined({cluster.address!r}, pathlib.Path({str(cluster.token)!r})):\n"
        "    ranks_of(2)\n    print('up', flush=True)\n    time.sleep(600)\n"
    )
    driver = psutil.Popen([sys.executable, "-c", script], stdout=-1, text=True)
    driver.stdout.readline()
    ranks = cluster.actors()
    driver.kill()
    driver.wait()
    return {"fault": "driver killed", "seen_s": gone(ranks, 60), "error": "", "again_s": None}


def show(title: str, rows: list[Row]) -> None:
    print(f"\n{title}")
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_cell(row.get(name)) for name in names] for row in rows]
    widths = [max(len(line[i]) for line in [names, *cells]) for i in range(len(names))]
    for line in [names, *cells]:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)))


def _cell(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else "" if value is None else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", nargs="+", default=["calls", "bytes", "faults"])
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--actors", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--megabytes", type=int, default=128)
    parser.add_argument("--profile", action="store_true", help="of a call, to stderr")
    options = parser.parse_args()
    found: dict[str, Any] = {"machine": machine()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        most = max([*options.actors, *options.receivers])
        if {"calls", "bytes"} & set(options.only):
            per_node = -(-most // options.nodes)
            with running_cluster(folder / "calls", options.nodes, per_node) as cluster:
                with joined(cluster.address, cluster.token):
                    found["nodes"] = [str(node) for node in nodes()]
                    if "calls" in options.only:
                        found["calls"] = calls(options.actors, options.profile)
                    if "bytes" in options.only:
                        found["bytes"] = transfers(options.receivers, options.megabytes)
        if "faults" in options.only:
            with running_cluster(folder / "faults", 3) as cluster:
                found["faults"] = faults(cluster, folder)
    if options.json:
        print(json.dumps(found))
        return
    print(", ".join(f"{name}: {value}" for name, value in found["machine"].items()))
    for title in ("calls", "bytes", "faults"):
        if title in found:
            show(title, found[title])


if __name__ == "__main__":
    main()
