"""A Ray cluster of several nodes on this machine, to try what a config does on a real one."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from posttrain.core.errors import ResourceError
from posttrain.core.runtime.files import WrongContent, read_json, write_text
from posttrain.core.store.locks import locked
from posttrain.pipelines.services.listening import HOST, check_port
from posttrain.pipelines.services.processes import (
    Launch,
    find,
    last_line,
    marked,
    signal_all,
    start,
    wait_gone,
)

if TYPE_CHECKING:
    from posttrain.core.cluster.on_ray.connection import Node

START_SECONDS = 120.0
STOP_SECONDS = 20.0
POLL_S = 0.3
# A node that answers nothing for five seconds is gone; Ray's own setting is about a minute.
HEALTH = {
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "5",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "20",  # a node without a head ends
}
MEMORY_SHARE, MOST_MEMORY = 0.3, 2e9
"""Of the machine's memory, what all nodes together have for objects; bytes of one node at most."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a local cluster is made of; `cpus` and `gpus` are those of each node, as Ray counts."""

    nodes: int
    cpus: int
    gpus: int
    port: int

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"


def require_ray() -> None:
    """Raise `ResourceError` where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ResourceError(
            "a cluster needs Ray, which is not installed: pip install 'posttrain[ray]', or remove "
            "the section cluster from the config"
        )


def token_file(home: Path) -> Path:
    """The token of the cluster of this home."""
    return home / "cluster" / "token"


def shape_of(home: Path) -> Shape | None:
    """The cluster that was started in this home; None without one."""
    path = home / "cluster" / "shape.json"
    if not path.exists():
        return None
    try:
        return Shape(**read_json(path, dict[str, int]))
    except (WrongContent, TypeError) as error:
        raise ResourceError(
            f"{path} does not hold what the cluster of this home is made of ({error}): end its "
            f"processes, if some run, and remove {path.parent}"
        ) from error


def up(home: Path, shape: Shape, say: Say) -> list[Node]:
    """Start the nodes that do not run, and return all once they have joined.

    Where the first, the head, has ended, the others are of no use: all are started again.
    """
    require_ray()
    from posttrain.core.cluster.on_ray.connection import write_token

    folder = home / "cluster"
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    (folder / "running").mkdir(exist_ok=True)
    with locked(folder / ".lock"):
        known = shape_of(home)
        count = known.nodes if known else 0
        missing = [number for number in range(count) if find(_record(home, number)) is None]
        if len(missing) < count and known != shape:
            assert known is not None
            raise ResourceError(
                f"a cluster of this home runs at {known.address} ({known.nodes} nodes with "
                f"{known.cpus} CPUs and {known.gpus} GPUs each): `posttrain cluster down` first"
            )
        if count == 0 or 0 in missing:
            _stop(home, say)
            check_port(shape.port, "--port", "Ray")
            write_token(token_file(home))
            write_text(folder / "shape.json", json.dumps(asdict(shape)))
            missing = list(range(shape.nodes))
        if not missing:
            return joined(home)
        try:
            for number in missing:
                launch = _node(home, shape, number)
                say(f"{launch.service:<9} starting; log: {launch.log}")
                start(launch, folder)
                if number == 0:
                    _wait(lambda: _listens(shape.port), launch)
            launches = [_node(home, shape, number) for number in missing]
            _wait(lambda: len(joined(home)) == shape.nodes, *launches, again=folder)
        except BaseException:
            if 0 in missing:  # what ran before goes on
                _stop(home, say)
            raise
        return joined(home)


def _node(home: Path, shape: Shape, number: int) -> Launch:
    memory = min(MEMORY_SHARE * psutil.virtual_memory().total / shape.nodes, MOST_MEMORY)
    role = (
        ["--head", "--port", str(shape.port), "--include-dashboard", "false", "--no-monitor"]
        if number == 0
        else ["--address", shape.address]
    )
    folder = home / "cluster"
    return Launch(
        service=f"node {number}",
        command=[
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *role),
            *("--node-ip-address", HOST, "--disable-usage-stats"),
            # What shows logs of all processes in others, and what asks a cloud for more nodes: a
            # run has no use for them, and the first reads all logs all the time.
            *("--include-log-monitor", "false"),
            *("--num-cpus", str(shape.cpus), "--num-gpus", str(shape.gpus)),
            *("--object-store-memory", str(int(memory))),
            *(("--temp-dir", str(_sockets(home))) if number == 0 else ()),
        ],
        environment={
            **os.environ,
            **HEALTH,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token_file(home)),
            # Ranks find the same packages, however this command found them.
            "PYTHONPATH": os.pathsep.join(folder or os.getcwd() for folder in sys.path),
            "PYTHONSAFEPATH": "1",
        },
        log=folder / "logs" / f"node-{number}.log",
        record=_record(home, number),
    )


def _record(home: Path, number: int) -> Path:
    return home / "cluster" / "running" / f"node-{number}.json"


def _sockets(home: Path) -> Path:
    """Where Ray keeps its sockets and logs: their paths may have 107 characters."""
    name = hashlib.sha256(str(home.resolve()).encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"posttrain-ray-{name}"


def _listens(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), 1).close()
    except OSError:
        return False
    return True


def _wait(ready: Callable[[], bool], *launches: Launch, again: Path | None = None) -> None:
    """Until it is `ready`.

    Ray gives a node 30 s to start, which a busy machine may not manage: with `again`, the folder of
    the cluster, one that has ended is started a second time, though not the head.
    """
    deadline = time.monotonic() + START_SECONDS
    second: set[str] = set()
    while not ready():
        launch = next((one for one in launches if find(one.record) is None), launches[-1])
        ended = find(launch.record) is None
        if ended and again is not None and launch.service not in {"node 0", *second}:
            second.add(launch.service)
            start(launch, again)
        elif ended or time.monotonic() > deadline:
            what = "ended while it started" if ended else f"is not up after {START_SECONDS:.0f} s"
            raise ResourceError(
                f"{launch.service} of the cluster {what}; its log {launch.log} ends with: "
                f"{last_line(launch.log)}"
            )
        time.sleep(POLL_S)


def joined(home: Path) -> list[Node]:
    """The nodes of this home's cluster; none where it is not up."""
    shape = shape_of(home)
    if shape is None or not _listens(shape.port):
        return []
    from posttrain.core.cluster.on_ray import connection

    connection.join(shape.address, token_file(home))
    try:
        return connection.nodes()
    finally:
        connection.leave()


def down(home: Path, say: Say) -> None:
    """Stop all nodes of this home and what they started."""
    folder = home / "cluster"
    if not folder.is_dir():
        say(f"no cluster in {home}")
        return
    with locked(folder / ".lock"):
        _stop(home, say)


def _stop(home: Path, say: Say) -> None:
    shape, folder = shape_of(home), home / "cluster"
    for number in reversed(range(shape.nodes if shape else 0)):
        record = _record(home, number)
        process = find(record)
        if process is not None:
            say(f"node {number:<4} stopping")
            family = [process, *process.children(recursive=True)]
            signal_all([process], signal.SIGTERM)
            signal_all(wait_gone(family, STOP_SECONDS), signal.SIGKILL)
        record.unlink(missing_ok=True)
    left = marked(folder)
    signal_all(left, signal.SIGKILL)
    wait_gone(left, STOP_SECONDS)
    shutil.rmtree(_sockets(home), ignore_errors=True)
    (folder / "shape.json").unlink(missing_ok=True)
    token_file(home).unlink(missing_ok=True)
