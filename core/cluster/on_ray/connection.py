"""The cluster that this process has joined: its nodes, their room, and its token.

Ray listens on all addresses of a machine, so a cluster is always asked for its token
(`RAY_AUTH_MODE=token`), and its address is always explicit: without one, Ray joins whatever cluster
was started last on the machine.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from posttrain.core.cluster.on_ray import watch
from posttrain.core.errors import ResourceError

MODE, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"
ANSWER_S = 5.0
"""What the port of a cluster has to answer."""
LOCAL = "local"
NAMESPACE = "posttrain"
TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster that is alive, and what it has in all."""

    address: str
    cpus: float
    gpus: float

    def __str__(self) -> str:
        return f"{self.address} ({self.cpus:g} CPUs, {self.gpus:g} GPUs)"


class _Connection:
    """The cluster that this process has joined, at most one at a time.

    `before` is what the environment said of tokens until then; `lost` says that ranks were lost
    since.
    """

    def __init__(self) -> None:
        self.address = ""
        self.folder: Path | None = None
        self.before: dict[str, str | None] = {}
        self.lost = False


_joined = _Connection()


def note_loss() -> None:
    """Something of ours on the cluster is gone, and perhaps a node with it."""
    _joined.lost = True


def has_lost() -> bool:
    """Whether something was lost since this process joined."""
    return _joined.lost


def write_token(path: Path) -> None:
    """A new token, readable by this user only."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(secrets.token_hex(TOKEN_BYTES))


def join(address: str, token: Path | None = None, cpus: int = 0) -> None:
    """Connect this process to the cluster at HOST:PORT, or start one of its own (`local`).

    A connection to the same address is kept. `token` is the cluster's; the environment's
    `RAY_AUTH_TOKEN_PATH` wins. A cluster of its own has at least `cpus` CPUs, as Ray counts them.
    Raises `ResourceError` where nothing answers, the token is not the cluster's, or this machine is
    not one of its nodes.
    """
    if ray.is_initialized() and _joined.address == address:
        return
    if ray.is_initialized():
        raise ResourceError(
            f"this process is connected to another Ray cluster ({_joined.address or 'not ours'}), "
            f"and {address} was asked for: leave that one first (ray.shutdown())"
        )
    options: dict[str, Any] = {}
    if address == LOCAL:
        _joined.folder = Path(tempfile.mkdtemp(prefix="posttrain-ray-"))
        token = _joined.folder / "token"
        write_token(token)
        options = {
            "include_dashboard": False,
            "num_cpus": max(cpus, os.cpu_count() or 1),
            "_temp_dir": str(_joined.folder / "files"),
        }
    else:
        _require_answer(address)
    wanted = {MODE: "token"}
    if token is not None and (address == LOCAL or TOKEN_PATH not in os.environ):
        wanted[TOKEN_PATH] = str(token)
    if address != LOCAL:  # whose processes would inherit it, and outlive their head for as long
        wanted |= watch.PATIENCE
    _joined.before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    _read_environment()
    try:
        with _signals_kept():
            ray.init(
                address=address,
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level=logging.ERROR,
                **options,
            )
    except Exception as error:  # Ray raises many types, of its own and of gRPC
        leave()
        raise ResourceError(
            f"the Ray cluster at {address} cannot be joined ({first_line(error)}): its token must "
            f"be in {TOKEN_PATH}, its versions of Python and Ray must be those of this environment "
            f"(Ray {ray.__version__}), and this machine must be one of its nodes"
        ) from error
    _joined.address = address
    watch.begin()


def leave() -> None:
    """Disconnect this process, and end the cluster that it started; may be called twice."""
    with _signals_kept():
        ray.shutdown()
    for name, value in _joined.before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if _joined.before:
        _read_environment()
    if _joined.folder is not None:
        shutil.rmtree(_joined.folder, ignore_errors=True)
    _joined.address, _joined.folder, _joined.lost, _joined.before = "", None, False, {}
    watch.forget()


def _read_environment() -> None:
    """Let Ray read mode and token again: it does when it is imported, as vLLM has done perhaps."""
    raylet = importlib.import_module("ray._raylet")  # in C, without types
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def nodes() -> list[Node]:
    """The nodes that are alive and were not asked to leave, ordered by address."""
    leaving = watch.draining()
    found = [
        Node(
            str(node["NodeManagerAddress"]),
            float(node["Resources"].get("CPU", 0.0)),
            float(node["Resources"].get("GPU", 0.0)),
        )
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] not in leaving
    ]
    return sorted(found, key=lambda node: node.address)


def room(bundle: Mapping[str, float], found: Sequence[Node]) -> int:
    """How many actors fit that take `bundle` (of CPU and GPU) each, where nothing else runs."""
    each = ({"CPU": node.cpus, "GPU": node.gpus} for node in found)
    return sum(min(int(has[name] // takes) for name, takes in bundle.items()) for has in each)


def without(bundle: Mapping[str, float], count: int, found: Sequence[Node]) -> list[Node]:
    """What is left of the nodes when `count` actors take `bundle` each, node after node."""
    left = []
    for node in found:
        here = min(count, room(bundle, [node]))
        count -= here
        cpus, gpus = (here * bundle.get(name, 0.0) for name in ("CPU", "GPU"))
        left.append(Node(node.address, node.cpus - cpus, node.gpus - gpus))
    return left


def _require_answer(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), ANSWER_S).close()
    except (OSError, ValueError) as error:
        raise ResourceError(
            f"no Ray cluster answers at {address} ({error}): start one (`posttrain cluster up` on "
            "this machine, or `ray start --head`), correct cluster.ray.address, or set it to "
            "'local'"
        ) from error


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray takes SIGTERM from a process that joins or leaves a cluster."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
