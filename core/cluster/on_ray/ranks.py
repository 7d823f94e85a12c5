"""Ranks as actors of a Ray cluster."""

from __future__ import annotations

import importlib
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from posttrain.core.cluster.group import Answerer, RankLost, first_cause
from posttrain.core.cluster.messages import decode, decode_beside, encode, encode_beside
from posttrain.core.cluster.on_ray.connection import first_line, has_lost, nodes, note_loss, room
from posttrain.core.cluster.on_ray.placement import POLL_S, no_room, placed, placed_within
from posttrain.core.cluster.on_ray.watch import hold, is_gone, require_cluster
from posttrain.core.errors import RunError
from posttrain.core.redaction import redact_output
from posttrain.core.runtime.collector import loading
from posttrain.core.runtime.startup import bounded_waiting

if TYPE_CHECKING:  # an actor says how many threads there may be before numpy is loaded
    import numpy as np
    from numpy.typing import NDArray

REGROUP_S = 15.0
"""How long ranks wait for as many nodes as there were before a loss."""
FEWER_S = 30.0
"""How long fewer ranks wait: a group that was just given up may hold their places for a while."""

INLINE_BYTES = 65_536
"""A message of this size at most goes with the call to each rank, as Ray allows up to 100 KB: the
object store takes longer for it. As bytes, which Ray does not pickle."""


@dataclass(frozen=True, slots=True)
class RankResources:
    """What each rank takes of its node, and the least number of ranks that is worth training."""

    cpus: int
    gpus: float
    least: int
    start_timeout_s: float
    peer_timeout_s: float = 300.0

    @property
    def bundle(self) -> dict[str, float]:
        """In Ray's words, without what is not needed."""
        amounts = {"CPU": float(self.cpus), "GPU": float(self.gpus)}
        return {name: amount for name, amount in amounts.items() if amount}


@dataclass(frozen=True, slots=True)
class Coded:
    """A rank's answer, and Ray's references in it: Ray must see whose they are."""

    data: NDArray[np.uint8]
    references: list[Any]  # Any: `ray.ObjectRef`, which is not typed


class RankActor:
    """One rank, in a process that Ray has started. Methods run one after another."""

    def __init__(self, worker: str, path: Sequence[str], env: Mapping[str, str]) -> None:
        # Before torch is loaded, which reads some of them.
        os.environ.update({**bounded_waiting(os.environ), **env, "LOCAL_RANK": "0"})
        redact_output()
        sys.path.extend(folder for folder in path if folder not in sys.path)
        self._worker = worker
        self._store: Any = None  # a TCPStore: torch is not loaded yet

    def place(self) -> tuple[str, str, list[str]]:
        """Address and id of its node, and which of its GPUs it has."""
        node_id: str = ray.get_runtime_context().get_node_id()
        return ray.util.get_node_ip_address(), node_id, [str(gpu) for gpu in ray.get_gpu_ids()]

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

    def meet(self, rank: int, size: int, host: str, port: int, peer_timeout_s: float) -> None:
        """Join the process group; returns when all ranks have."""
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
        with loading():
            import torch
            import torch.distributed as dist
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            build = importlib.import_module(self._worker).build
        if interface := _interface_of(ray.util.get_node_ip_address()):
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(0)  # Ray shows a process the GPUs that it has, and no other
        store = self._store or TCPStore(host, port, size, False)
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            timeout=timedelta(seconds=peer_timeout_s),
            store=store,
            rank=rank,
            world_size=size,
        )
        self._answerer = Answerer(build, rank)

    def answer(self, message: bytes | NDArray[np.uint8]) -> bytes | Coded:
        """As `Answerer.answer`, of and into encoded messages; a small one as bytes."""
        answer = self._answerer.answer(decode(message))
        data, references = encode_beside(answer, ray.ObjectRef)
        if not references and data.nbytes <= INLINE_BYTES:
            return bytes(data)
        import numpy as np

        return Coded(np.frombuffer(data, dtype=np.uint8), references)


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
    What ranks read and write must be at the same paths for all, or in a store with a URL.
    """

    folder: Path | None = None
    actor_class: type[RankActor] = RankActor

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
        cls = ray.remote(self.actor_class)
        path = [folder or os.getcwd() for folder in sys.path]
        self._actors = [
            cls.options(
                num_cpus=resources.cpus,
                num_gpus=resources.gpus,
                max_restarts=0,
                enable_task_events=False,  # for Ray's dashboard: they cost as much as a call
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=index
                ),
            ).remote(self._worker, path, self._env)
            for index in range(self.size)
        ]
        places = self._get([actor.place.remote() for actor in self._actors], check)
        hold(self, {node_id for _, node_id, _ in places})
        order = sorted(range(self.size), key=lambda index: places[index])
        self._actors = [self._actors[index] for index in order]
        (host, port), *_ = self._get([self._actors[0].open_store.remote(self.size)], check)
        meetings = [
            actor.meet.remote(rank, self.size, host, port, resources.peer_timeout_s)
            for rank, actor in enumerate(self._actors)
        ]
        self._get(meetings, check)
        self._ask(setup, check)

    def call(self, method: str, *args: object, check: Callable[[], None]) -> Any:
        """As in `RankGroup`; the arguments go once to each node."""
        return self._ask((method, args), check)

    def _ask(self, message: object, check: Callable[[], None]) -> Any:
        import numpy as np

        data = encode(message)
        require_cluster()
        small = data.nbytes <= INLINE_BYTES
        given = bytes(data) if small else ray.put(np.frombuffer(data, dtype=np.uint8))
        answers = self._get([actor.answer.remote(given) for actor in self._actors], check)
        return answers[0]

    def _get(self, references: Sequence[Any], check: Callable[[], None]) -> list[Any]:
        """What the actors return, of answers the value. Raises the first error in an answer.

        The other ranks wait in vain for one that has failed: whoever has not answered by the next
        look is not waited for.
        """
        found: dict[int, Any] = {}
        waiting = {reference: index for index, reference in enumerate(references)}
        failures: list[Exception] = []
        while waiting:
            check()
            require_cluster()
            ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=POLL_S)
            if failures and not ready:
                break
            for reference in ready:
                index = waiting.pop(reference)
                try:
                    found[index] = ray.get(reference)
                except ray.exceptions.RayTaskError as error:  # in `meet`, before there are answers
                    what = first_line(error.cause or error)
                    failures.append(RunError(f"rank {index} of the learner failed: {what}"))
                    continue
                except ray.exceptions.RayError as error:
                    raise self._lost(error) from error
                coded = found[index]
                if isinstance(coded, bytes):  # the answer to a call
                    failure, found[index] = decode(coded)
                elif isinstance(coded, Coded):
                    failure, found[index] = decode_beside(coded.data, coded.references)
                else:
                    continue
                failures += [] if failure is None else [failure]
        if failures:
            cause = first_cause(failures)
            if isinstance(cause, RankLost):
                self._settle()
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
            short = has_lost() and room(bundle, nodes()) < wanted
            return waited > min(limit, REGROUP_S if short else limit)

        if group := placed(bundle, wanted, is_over, check):
            return group
        self.size = min(wanted - 1, room(bundle, nodes()))
        if self.size >= self._resources.least:
            if group := placed_within(bundle, self.size, FEWER_S, check):
                return group
        least = self._resources.least
        fewer = f", nor for {least}," if least < wanted else ""
        raise no_room(
            f"{wanted} ranks{fewer}",
            bundle,
            limit,
            "limits.learner_ranks, cluster.learner.cpus or cluster.learner.gpus",
        )

    def _lost(self, error: Exception) -> RankLost:
        self._settle()
        self.close()
        return RankLost(
            "a rank of the learner is gone: its process was killed, for memory perhaps, or its "
            f"node left the cluster. Ray says: {first_line(error)}"
        )

    def _settle(self) -> None:
        """Note that ranks are gone. Raises `ResourceError` where the head is, which explains it."""
        note_loss()
        require_cluster(wait=True)

    def close(self) -> None:
        """As in `RankGroup`."""
        hold(self, ())
        if ray.is_initialized() and not is_gone():
            for actor in self._actors:
                ray.kill(actor)
            if self._group is not None:
                remove_placement_group(self._group)
        self._actors, self._group = [], None
