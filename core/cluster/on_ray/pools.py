"""Pools of work on the nodes of a Ray cluster: an actor on each, which runs one worker module."""

from __future__ import annotations

import asyncio
import importlib
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from posttrain.core.cluster.node_pool import Batch, NodeWorker, Sharing, Work
from posttrain.core.cluster.on_ray.connection import first_line, note_loss
from posttrain.core.cluster.on_ray.placement import POLL_S, no_room
from posttrain.core.cluster.on_ray.watch import is_gone, require_cluster
from posttrain.core.errors import PosttrainError, ResourceError, RunError
from posttrain.core.redaction import redact_output

LANES = 32
"""Batches that an actor takes at once; how many items of them, is its worker's to say."""
SETTLE_S = 3.0
"""How long a pool on all nodes waits for room on those that are busy: Ray's news are a bit old."""
REGROW_S = 15.0
"""How long a pool that has lost its last node waits for room on another."""
REFILL_S = 1.0
CLOSE_S = 5.0
MOST_STARTS = 3
"""Processes that may end on one node while they start."""
MOST_LOSSES = 40
"""Actors that may be lost in one call of `map`: an item that kills one takes a dozen to find."""


@dataclass(frozen=True, slots=True)
class PoolResources:
    """What an actor takes of its node, on how many nodes (None = each that has room).

    `section` is what configs call the pool.
    """

    section: str
    cpus: int
    nodes: int | None
    start_timeout_s: float


class NodeActor:
    """A node's worker, in a process that Ray has started. All bytes are pickled by our side."""

    def __init__(self, worker: str, path: Sequence[str]) -> None:
        redact_output()
        sys.path.extend(folder for folder in path if folder not in sys.path)
        self._worker = worker
        self._lanes = ThreadPoolExecutor(LANES, thread_name_prefix="batch")
        self._work: NodeWorker | None = None

    async def start(self, setup: bytes) -> str:
        """Build the worker; why this node is not fit, or nothing."""
        try:
            self._work = await self._run(self._build, setup)
        except Exception as error:  # whatever building raises is for the caller to read
            return _said(error)
        return ""

    def _build(self, setup: bytes) -> NodeWorker:
        build = importlib.import_module(self._worker).build
        worker: NodeWorker = build(pickle.loads(setup))  # noqa: S301 - from our own process
        return worker

    async def answer(self, batch: bytes) -> bytes:
        """(error, answers) of the items in `batch`."""
        answers: bytes = await self._run(self._answer, batch)
        return answers

    def _answer(self, batch: bytes) -> bytes:
        assert self._work is not None, "it has started"
        try:
            items = pickle.loads(batch)  # noqa: S301 - from our own process
            found = None, list(self._work.answer(items))
            return pickle.dumps(found, protocol=5)
        except Exception as error:  # whatever a worker raises is the caller's to see
            kept = error if isinstance(error, PosttrainError) else RunError(_said(error))
            return pickle.dumps((kept, []), protocol=5)

    async def close(self) -> None:
        """End what the worker has started."""
        if self._work is not None:
            await self._run(self._work.close)

    async def _run(self, function: Callable[..., Any], *args: object) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._lanes, function, *args)


def _said(error: Exception) -> str:
    text = first_line(error)
    return text if isinstance(error, PosttrainError) else f"{type(error).__name__}: {text}"


@dataclass
class _Node:
    """An actor and what it has to do. It is `ready` once its worker is built."""

    id: str
    label: str
    actor: Any  # a handle, whose methods Ray makes
    starting: Any
    began: float = field(default_factory=time.monotonic)
    ready: bool = False
    running: dict[Any, tuple[Batch, float]] = field(default_factory=dict)  # reference: deadline

    @property
    def held(self) -> int:
        return sum(len(batch.places) for batch, _ in self.running.values())

    @property
    def is_alone(self) -> bool:
        """Whether it does a batch that must be alone with it."""
        return any(batch.is_alone for batch, _ in self.running.values())


class RayNodes:
    """A `NodePool` of actors. The process must have joined a cluster.

    Actors that are lost are replaced where there is room, at the same place or another.
    """

    def __init__(
        self,
        worker: str,
        resources: PoolResources,
        sharing: Sharing,
        warn: Callable[[str], None],
    ) -> None:
        self._worker, self._resources, self._sharing = worker, resources, sharing
        self._warn = warn
        self._setup = b""
        self._nodes: list[_Node] = []
        self._refused: dict[str, str] = {}  # nodes that are not fit, and why
        self._starts_lost: dict[str, int] = {}
        self._wanted = 1
        self._refilled = 0.0
        self._lost_all = False
        self._lock = threading.Lock()

    @property
    def labels(self) -> list[str]:
        """The nodes that answer, in words."""
        return [node.label for node in self._nodes if node.ready]

    def start(self, setup: object, check: Callable[[], None]) -> None:
        """As in `NodePool`."""
        self._setup = pickle.dumps(setup, protocol=5)
        limit, began = self._resources.start_timeout_s, time.monotonic()
        try:
            while not self._has_enough(time.monotonic() - began):
                check()
                late = time.monotonic() - began > limit
                if late and all(node.ready for node in self._nodes):
                    break
                if not late:
                    self._grow(self._resources.nodes)
                self._take_in_started(POLL_S)
        except BaseException:
            self.close()
            raise
        self._wanted = len(self._nodes)
        if not self._nodes or self._wanted < (self._resources.nodes or 1):
            self.close()
            raise self._no_room()

    def _has_enough(self, waited: float) -> bool:
        starting = any(not node.ready for node in self._nodes)
        fit = [node for node in _alive(self._resources.cpus) if node not in self._refused]
        if starting:
            return False
        if self._resources.nodes is not None:
            return len(self._nodes) == self._resources.nodes or len(fit) < self._resources.nodes
        if not fit and self._refused:
            return True
        return bool(self._nodes) and (len(self._nodes) >= len(fit) or waited > SETTLE_S)

    def _no_room(self) -> ResourceError:
        section, refused = self._resources.section, "; ".join(self._refused.values())
        wanted = self._resources.nodes or 1
        if refused:
            return ResourceError(
                f"{section}: {len(self._refused)} of the cluster's nodes cannot be used, and "
                f"{wanted} {'is' if wanted == 1 else 'are'} needed: {refused}"
            )
        return no_room(
            f"{section} on {wanted} {'node' if wanted == 1 else 'nodes'}",
            {"CPU": self._resources.cpus},
            self._resources.start_timeout_s,
            f"{section}.cpus or {section}.nodes",
        )

    def _grow(self, most: int | None) -> None:
        """Start actors on nodes with room that have none, up to `most` of them."""
        require_cluster(wait=True)
        used = {node.id for node in self._nodes} | set(self._refused)
        free = available_resources_per_node()
        path = [folder or os.getcwd() for folder in sys.path]
        for number, address in _alive(self._resources.cpus).items():
            if most is not None and len(self._nodes) >= most:
                break
            if number in used or free.get(number, {}).get("CPU", 0.0) < self._resources.cpus:
                continue
            actor = (
                ray.remote(NodeActor)
                .options(
                    num_cpus=self._resources.cpus,
                    max_restarts=0,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(
                        number, soft=False, _fail_on_unavailable=True
                    ),
                )
                .remote(self._worker, path)
            )
            label = f"node {address} ({number[:8]})"
            self._nodes.append(_Node(number, label, actor, actor.start.remote(self._setup)))

    def _take_in_started(self, timeout: float) -> None:
        """Learn which actors have built their workers, and which nodes are not fit."""
        starting = {node.starting: node for node in self._nodes if not node.ready}
        if not starting:
            time.sleep(timeout)
            return
        require_cluster()
        ready, waiting = ray.wait(list(starting), num_returns=1, timeout=timeout)
        for reference in ready:
            node = starting[reference]
            try:
                refusal = str(ray.get(reference))
            except ray.exceptions.ActorUnschedulableError:  # somebody was faster, or it is gone
                self._drop(node)
                continue
            except ray.exceptions.RayError as error:
                note_loss()
                lost = self._starts_lost.get(node.id, 0) + 1
                self._starts_lost[node.id] = lost
                if lost < MOST_STARTS:
                    self._drop(node)
                    continue
                refusal = f"its process ended while it started, {lost} times ({first_line(error)})"
            if refusal:
                self._refuse(node, refusal)
            else:
                node.ready = True
        limit = self._resources.start_timeout_s
        for node in [starting[reference] for reference in waiting]:
            if time.monotonic() - node.began > limit:
                self._refuse(node, f"its process did not start within {limit:g} s")

    def _refuse(self, node: _Node, why: str) -> None:
        """Use a node no more."""
        self._refused[node.id] = f"{node.label}: {why}"
        self._warn(f"{self._resources.section} leaves out {node.label}: {why}")
        self._drop(node)

    def map(self, items: Sequence[Any], check: Callable[[], None]) -> list[Any]:
        """As in `NodePool`."""
        with self._lock:
            work, losses, checked = Work(items), 0, 0.0
            try:
                while not work.is_done:
                    if time.monotonic() - checked > POLL_S:
                        check()
                        checked = time.monotonic()
                    self._refill()
                    self._hand_out(work)
                    if not self._running():
                        work.settle(node.label for node in self._nodes)
                        if not self._nodes and not self._regrown(check):
                            work.give_up("no node of the cluster is left that could take it")
                        if any(not node.ready for node in self._nodes):
                            self._take_in_started(POLL_S)
                        continue
                    losses += self._collect(work)
                    if losses > MOST_LOSSES:
                        raise RunError(
                            f"{self._resources.section}: {losses} of its processes on nodes were "
                            "lost in one step, one after another; look at the memory of the nodes"
                        )
            except BaseException:
                self.close()  # what still runs has no reader any more
                raise
            return [work.answers[place] for place in range(len(items))]

    def _running(self) -> bool:
        return any(node.running for node in self._nodes)

    def _refill(self) -> None:
        """Replace actors that were lost, where there is room now."""
        missing = len(self._nodes) < self._wanted
        if missing and time.monotonic() - self._refilled > REFILL_S:
            self._refilled = time.monotonic()
            self._grow(self._wanted)

    def _regrown(self, check: Callable[[], None]) -> bool:
        """Wait until an actor of the pool is there again; False where no node has room."""
        until = time.monotonic() + (0.0 if self._lost_all else REGROW_S)
        while not self._nodes:
            check()
            self._grow(self._wanted)
            if not self._nodes:
                if time.monotonic() >= until:
                    self._lost_all = True
                    return False
                time.sleep(POLL_S)
        self._lost_all = False
        return True

    def _hand_out(self, work: Work) -> None:
        """Give batches to the nodes that hold least, while there are both."""
        ready = [node for node in self._nodes if node.ready]
        while ready := [node for node in ready if not node.is_alone]:
            node = min(ready, key=lambda node: node.held)
            batch = work.next_for(node.label, node.held, len(ready), self._sharing)
            if batch is None:
                ready.remove(node)
                continue
            message = pickle.dumps([work.items[place] for place in batch.places], protocol=5)
            until = time.monotonic() + self._sharing.limit_s(len(batch.places))
            node.running[node.actor.answer.remote(message)] = (batch, until)

    def _collect(self, work: Work) -> int:
        """Wait for the next event, and take in what came; how many actors were lost."""
        references = {ref: node for node in self._nodes for ref in node.running}
        starting = [node.starting for node in self._nodes if not node.ready]
        waited = [*references, *starting]
        require_cluster()
        ready, _ = ray.wait(waited, num_returns=1, timeout=POLL_S)
        if ready:  # what else has come by now
            ready, _ = ray.wait(waited, num_returns=len(waited), timeout=0)
        if any(reference in starting for reference in ready):
            self._take_in_started(0)
        gone: dict[str, tuple[_Node, str]] = {}
        for reference in ready:
            node = references.get(reference)
            if node is None or node.id in gone:
                continue
            try:
                error, answers = pickle.loads(ray.get(reference))  # noqa: S301 - from our actor
            except ray.exceptions.RayTaskError as failed:  # it could not even read the message
                raise RunError(f"{node.label}: {first_line(failed.cause or failed)}") from failed
            except ray.exceptions.RayError as lost:
                gone[node.id] = (node, f"{node.label} was lost ({first_line(lost)})")
                continue
            batch, _ = node.running.pop(reference)
            if error is not None:
                raise _at(node, error)
            work.answered(batch, node.label, answers)
        now = time.monotonic()
        for node in self._nodes:
            if any(now > until for _, until in node.running.values()):
                gone.setdefault(node.id, (node, f"{node.label} did not answer in time"))
        for node, reason in gone.values():
            self._lose(node, reason, work)
        return len(gone)

    def _lose(self, node: _Node, reason: str, work: Work) -> None:
        note_loss()
        self._warn(f"{self._resources.section}: {reason}; what it had is done elsewhere")
        for batch, _ in node.running.values():
            work.lost(batch, reason)
        self._drop(node)

    def _drop(self, node: _Node) -> None:
        self._nodes.remove(node)
        ray.kill(node.actor)

    def close(self) -> None:
        """As in `NodePool`."""
        if ray.is_initialized() and not is_gone():
            closing = [node.actor.close.remote() for node in self._nodes if node.ready]
            if closing:
                ray.wait(closing, num_returns=len(closing), timeout=CLOSE_S)
            for node in list(self._nodes):
                self._drop(node)
        self._nodes = []


def _at(node: _Node, error: PosttrainError) -> PosttrainError:
    """The same error, which says where it was raised."""
    try:
        return type(error)(f"{node.label}: {error}")
    except TypeError:
        return error


def _alive(cpus: int) -> dict[str, str]:
    """Addresses by id of the nodes that have so many CPUs in all, in a fixed order."""
    found: Iterator[tuple[str, str]] = (
        (str(node["NodeID"]), str(node["NodeManagerAddress"]))
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("CPU", 0.0) >= cpus
    )
    return dict(sorted(found, key=lambda node: (node[1], node[0])))
