"""Ranks as actors of a Ray cluster. The only module that imports Ray.

Ray listens on all addresses of a machine, so a cluster is always asked for its token
(`RAY_AUTH_MODE=token`), and its address is always explicit: without one, Ray joins whatever cluster
was started last on the machine.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import pickle
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from posttrain.core.cluster.group import Answer, Answerer, RankLost, first_cause
from posttrain.core.errors import ResourceError, RunError
from posttrain.core.runtime.startup import bounded_waiting

MODE, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"
POLL_S = 0.2
ANSWER_S = 5.0
"""What the port of a cluster has to answer."""
REGROUP_S = 15.0
"""How long ranks wait for as many nodes as there were before a loss."""
FEWER_S = 30.0
"""How long fewer ranks wait: a group that was just given up may hold their places for a while."""
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


@dataclass(frozen=True, slots=True)
class RankResources:
    """What each rank takes of its node, and the least number of ranks that is worth training."""

    cpus: int
    gpus: float
    least: int
    start_timeout_s: float

    @property
    def bundle(self) -> dict[str, float]:
        """In Ray's words, without what is not needed."""
        amounts = {"CPU": float(self.cpus), "GPU": float(self.gpus)}
        return {name: amount for name, amount in amounts.items() if amount}


# --- The connection of this process ---------------------------------------------------------------


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
            f"the Ray cluster at {address} cannot be joined ({_first_line(error)}): its token must "
            f"be in {TOKEN_PATH}, its versions of Python and Ray must be those of this environment "
            f"(Ray {ray.__version__}), and this machine must be one of its nodes"
        ) from error
    _joined.address = address


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


def _read_environment() -> None:
    """Let Ray read mode and token again: it does when it is imported, as vLLM has done perhaps."""
    raylet = importlib.import_module("ray._raylet")  # in C, without types
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def nodes() -> list[Node]:
    """The nodes that are alive, ordered by address."""
    found = [
        Node(
            str(node["NodeManagerAddress"]),
            float(node["Resources"].get("CPU", 0.0)),
            float(node["Resources"].get("GPU", 0.0)),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(found, key=lambda node: node.address)


def room(bundle: Mapping[str, float], found: Sequence[Node]) -> int:
    """How many ranks that take `bundle` (of CPU and GPU) each fit, when nothing else runs there."""
    each = ({"CPU": node.cpus, "GPU": node.gpus} for node in found)
    return sum(min(int(has[name] // takes) for name, takes in bundle.items()) for has in each)


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


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


# --- Ranks ----------------------------------------------------------------------------------------


class RankActor:
    """One rank, in a process that Ray has started. Methods run one after another."""

    def __init__(self, worker: str, path: Sequence[str], env: Mapping[str, str]) -> None:
        # Before torch is loaded, which reads some of them.
        os.environ.update({**bounded_waiting(os.environ), **env, "LOCAL_RANK": "0"})
        sys.path.extend(folder for folder in path if folder not in sys.path)
        self._worker = worker
        self._store: Any = None  # a TCPStore: torch is not loaded yet

    def place(self) -> tuple[str, list[str]]:
        """The address of its node, and which of its GPUs it has."""
        return ray.util.get_node_ip_address(), [str(gpu) for gpu in ray.get_gpu_ids()]

    def open_store(self, size: int) -> tuple[str, int]:
        """Where all ranks meet: a store of this process, on its node's address only."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        host: str = ray.util.get_node_ip_address()
        listener = socket.socket()
        listener.bind((host, 0))
        listener.listen(size)
        port = int(listener.getsockname()[1])
        self._store = TCPStore(
            host, port, size, True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return host, port

    def meet(self, rank: int, size: int, host: str, port: int) -> None:
        """Join the process group; returns when all ranks have."""
        import torch
        import torch.distributed as dist
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
        if interface := _interface_of(ray.util.get_node_ip_address()):
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(0)  # Ray shows a process the GPUs that it has, and no other
        store = self._store or TCPStore(host, port, size, False)
        dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=size)
        build = importlib.import_module(self._worker).build
        self._answerer = Answerer(build, rank)

    def answer(self, message: Any) -> Answer:
        """As `Answerer.answer`, of the message pickled into an array of bytes."""
        given = pickle.loads(message)  # noqa: S301 - from our own process
        return self._answerer.answer(given)


def _interface_of(address: str) -> str:
    """The network interface that has this address; empty if none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address == address for found in addresses):
            return str(name)
    return ""


class RayRanks:
    """A `RankGroup` of actors, each in a bundle of one placement group.

    The process must have joined a cluster. With fewer resources than `size` ranks need there are
    fewer of them, at least `resources.least`, once `start_timeout_s` is over, or `REGROUP_S` after
    a node was lost: `size` says how many.
    Every rank must see the run's home and its models at the same paths.
    """

    folder: Path | None = None

    def __init__(
        self, size: int, worker: str, env: Mapping[str, str], resources: RankResources
    ) -> None:
        self.size = size
        self._worker, self._env, self._resources = worker, env, resources
        self._group: PlacementGroup | None = None
        self._actors: list[Any] = []  # Any: handles, whose methods Ray makes

    def start(self, setup: object, check: Callable[[], None]) -> None:
        """As in `RankGroup`. Raises `ResourceError` where the cluster has no room for the ranks."""
        resources, bundle = self._resources, self._resources.bundle
        self._group = self._place(bundle, check)
        cls = ray.remote(RankActor)
        path = [folder or os.getcwd() for folder in sys.path]
        self._actors = [
            cls.options(
                num_cpus=resources.cpus,
                num_gpus=resources.gpus,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=index
                ),
            ).remote(self._worker, path, self._env)
            for index in range(self.size)
        ]
        places = self._get([actor.place.remote() for actor in self._actors], check)
        order = sorted(range(self.size), key=lambda index: places[index])
        self._actors = [self._actors[index] for index in order]
        (host, port), *_ = self._get([self._actors[0].open_store.remote(self.size)], check)
        meetings = [
            actor.meet.remote(rank, self.size, host, port)
            for rank, actor in enumerate(self._actors)
        ]
        self._get(meetings, check)
        self._ask(setup, check)

    def call(self, method: str, *args: object, check: Callable[[], None]) -> Any:
        """As in `RankGroup`; the arguments go once to each node."""
        return self._ask((method, args), check)

    def _ask(self, message: object, check: Callable[[], None]) -> Any:
        import numpy as np

        pickled = np.frombuffer(pickle.dumps(message, protocol=5), dtype=np.uint8)
        reference = ray.put(pickled)
        answers = self._get([actor.answer.remote(reference) for actor in self._actors], check)
        return answers[0][1]

    def _get(self, references: Sequence[Any], check: Callable[[], None]) -> list[Any]:
        """What the actors return. Raises the first error that a rank answers.

        The other ranks wait in vain for one that has failed: whoever has not answered by the next
        look is not waited for.
        """
        found: dict[int, Any] = {}
        waiting = {reference: index for index, reference in enumerate(references)}
        failures: list[Exception] = []
        while waiting:
            check()
            ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=POLL_S)
            if failures and not ready:
                break
            for reference in ready:
                index = waiting.pop(reference)
                try:
                    found[index] = ray.get(reference)
                except ray.exceptions.RayTaskError as error:  # in `meet`, before there are answers
                    what = _first_line(error.cause or error)
                    failures.append(RunError(f"rank {index} of the learner failed: {what}"))
                    continue
                except ray.exceptions.RayError as error:
                    raise self._lost(error) from error
                if isinstance(found[index], tuple) and isinstance(found[index][0], Exception):
                    failures.append(found[index][0])
        if failures:
            cause = first_cause(failures)
            _joined.lost |= isinstance(cause, RankLost)
            self.close()
            raise cause
        return [found[index] for index in range(len(references))]

    def _place(self, bundle: Mapping[str, float], check: Callable[[], None]) -> PlacementGroup:
        """A placement group for `size` ranks, or for as many as there is room for."""
        wanted, limit = self.size, self._resources.start_timeout_s
        began = time.monotonic()

        def is_over() -> bool:
            waited = time.monotonic() - began
            # A node that is gone seldom comes back soon.
            short = _joined.lost and room(bundle, nodes()) < wanted
            return waited > min(limit, REGROUP_S if short else limit)

        if group := _placed(bundle, wanted, is_over, check):
            return group
        self.size = min(wanted - 1, room(bundle, nodes()))
        if self.size >= self._resources.least:
            until = time.monotonic() + FEWER_S
            if group := _placed(bundle, self.size, lambda: time.monotonic() > until, check):
                return group
        each = " and ".join(f"{amount:g} {name}" for name, amount in bundle.items())
        free = ray.available_resources()
        least = self._resources.least
        fewer = f", nor for {least}," if least < wanted else ""
        raise ResourceError(
            f"the Ray cluster had no room for {wanted} ranks{fewer} with {each} each within "
            f"{limit:g} s (cluster.ray.start_timeout_s). Its nodes: "
            f"{', '.join(map(str, nodes())) or 'none'}; free now: {free.get('CPU', 0.0):g} CPUs, "
            f"{free.get('GPU', 0.0):g} GPUs. Add nodes, end what holds them, or lower "
            "limits.learner_ranks, cluster.learner.cpus or cluster.learner.gpus"
        )

    def _lost(self, error: Exception) -> RankLost:
        _joined.lost = True
        self.close()
        return RankLost(
            "a rank of the learner is gone: its process was killed, for memory perhaps, or its "
            f"node left the cluster. Ray says: {_first_line(error)}"
        )

    def close(self) -> None:
        """As in `RankGroup`."""
        if ray.is_initialized():
            for actor in self._actors:
                ray.kill(actor)
            if self._group is not None:
                remove_placement_group(self._group)
        self._actors, self._group = [], None


def _placed(
    bundle: Mapping[str, float],
    count: int,
    is_over: Callable[[], bool],
    check: Callable[[], None],
) -> PlacementGroup | None:
    """A placement group with `count` bundles; None where it is not there when `is_over`."""
    group: PlacementGroup = placement_group([dict(bundle)] * count, strategy="PACK")
    try:
        while not group.wait(POLL_S):
            check()
            if is_over():
                remove_placement_group(group)
                return None
    except BaseException:
        remove_placement_group(group)
        raise
    return group
