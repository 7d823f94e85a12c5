"""Groups of ranks on a cluster, for tests and measurements of what becomes of them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.core.cluster.on_ray import connection
from posttrain.core.cluster.on_ray.ranks import RankResources, RayRanks
from posttrain.core.runtime.processes import free_ports
from posttrain.pipelines.services.cluster import HEALTH
from tests.helpers.network import Namespace
from tests.helpers.ranks import LIGHT, nothing


@contextlib.contextmanager
def joined(address: str, token: Path) -> Iterator[None]:
    """This process is connected to that cluster."""
    connection.join(address, token)
    try:
        yield
    finally:
        connection.leave()


def ranks_of(
    size: int, least: int = 1, worker: str = LIGHT, cpus: int = 1, **limits: float
) -> RayRanks:
    """A group that has started."""
    resources = RankResources(cpus, 0, least, **({"start_timeout_s": 60.0} | limits))
    made = RayRanks(size, worker, {"OMP_NUM_THREADS": "1"}, resources)
    made.start(None, nothing)
    return made


def struck(fault: Callable[[], object], ranks: RayRanks) -> tuple[Exception, float]:
    """The error that a fault in the midst of updates leads to, and after how many seconds."""
    ranks.call("update", check=nothing)
    moment: list[float] = []

    def strike() -> None:
        moment.append(time.monotonic())
        fault()

    thread = threading.Timer(0.3, strike)
    thread.start()
    try:
        while True:
            ranks.call("update", check=nothing)
    except Exception as error:  # whatever it is: the caller judges
        return error, time.monotonic() - moment[0]
    finally:
        thread.join()


@dataclass(frozen=True, slots=True)
class TwoMachines:
    """A cluster of two nodes, one of them in a network namespace of its own."""

    address: str
    token: Path
    cut: Callable[[], None]


@contextlib.contextmanager
def two_machines(folder: Path) -> Iterator[TwoMachines]:
    """Such a cluster, with the settings of those that `posttrain cluster up` starts."""
    token, (port,) = folder / "token", free_ports(1)
    connection.write_token(token)
    environment = {
        **os.environ,
        **HEALTH,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
    sockets = Path("/tmp") / f"pt-cut-{os.getpid()}"  # noqa: S108 - paths of sockets are short
    started: list[subprocess.Popen[Any]] = []

    def start(*words: str, before: tuple[str, ...] = ()) -> None:
        ray = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block")
        command = [*before, *ray, "--disable-usage-stats", "--num-cpus", "1", *words]
        quiet = subprocess.DEVNULL
        started.append(
            subprocess.Popen(
                command, env=environment, stdout=quiet, stderr=quiet, start_new_session=True
            )
        )

    with Namespace.made() as other:
        address = f"{other.here}:{port}"
        head = ("--head", "--port", str(port), "--include-dashboard", "false")
        try:
            start(*head, "--node-ip-address", other.here, "--temp-dir", str(sockets))
            _until(lambda: _answers(other.here, port))
            start("--address", address, "--node-ip-address", other.there, before=other.inside)
            with joined(address, token):
                _until(lambda: len(connection.nodes()) == 2)
            yield TwoMachines(address, token, other.cut)
        finally:
            for node in reversed(started):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(node.pid, signal.SIGTERM)
            for node in started:
                try:
                    node.wait(20)
                except subprocess.TimeoutExpired:
                    os.killpg(node.pid, signal.SIGKILL)
            shutil.rmtree(sockets, ignore_errors=True)


def _until(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + 90
    while not ready():
        assert time.monotonic() < end, "the cluster did not come up"
        time.sleep(0.3)


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 1).close()
    except OSError:
        return False
    return True
