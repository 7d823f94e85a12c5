"""Servers on the nodes of a Ray cluster, each the child of an actor that hands requests to it.

A server listens on its node's loopback address only: vLLM's key does not protect the routes by
which weights are replaced, and calls of an actor are authenticated by Ray. No port is open to a
network.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from posttrain.core.cluster.on_ray.connection import first_line
from posttrain.core.cluster.on_ray.objects import remove_left_behind, write_files
from posttrain.core.cluster.on_ray.placement import no_room, placed_within
from posttrain.core.cluster.on_ray.watch import is_gone, require_cluster
from posttrain.core.cluster.servers import (
    CONNECT_S,
    LOOPBACK,
    SentFiles,
    last_words,
    loopback_command,
)
from posttrain.core.cluster.shared import ServerPlaces, SharedFiles
from posttrain.core.errors import ResourceError
from posttrain.core.runtime.http_client import Json, Reply, Unreachable, ask, make_client
from posttrain.core.runtime.processes import ServerProcess, free_ports

T = TypeVar("T")
SPARE_S = 5.0
"""What the way to an actor and back may take on top of a request's own time."""
ACTOR_START_S = 60.0
"""What an actor may take to start once it has its place."""
STOP_S = 30.0
LOOK_S = 1.0
CALLS_AT_ONCE = 100_000


class ServerActor:
    """Starts one server as its child, and hands it what it is asked. The child ends with it."""

    def __init__(self, path: Sequence[str], timeout_s: float, connections: int) -> None:
        sys.path.extend(folder for folder in path if folder not in sys.path)
        self._timeout_s, self._connections = timeout_s, connections
        self._folder = Path(tempfile.mkdtemp(prefix="posttrain-server-"))
        self._process: ServerProcess | None = None
        self._client: aiohttp.ClientSession | None = None
        self._url = ""
        remove_left_behind()

    async def start(self, arguments: Sequence[str], env: Mapping[str, str]) -> str:
        """Start it; returns the address of the node."""
        (port,) = free_ports(1)
        self._client = await make_client(self._timeout_s, self._connections, connect_s=CONNECT_S)
        self._url = f"http://{LOOPBACK}:{port}"
        # A server of its own needs nothing of the cluster, and shall not have its token.
        own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        found = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONSAFEPATH": "1"}
        self._process = ServerProcess(
            loopback_command(arguments, port), {**own, **found, **env}, self._folder / "log.txt"
        )
        return str(ray.util.get_node_ip_address())

    async def ask(self, path: str, body: Json | None, limit_s: float | None) -> tuple[int, str]:
        """Status and text of its answer; status 0, and why, where there is none."""
        assert self._client is not None
        try:
            reply = await ask(self._client, f"{self._url}{path}", body, limit_s)
        except Unreachable as error:
            return 0, str(error)
        return reply.status, reply.text

    async def state(self) -> tuple[bool, str]:
        """Whether its process has ended, and its last words."""
        assert self._process is not None
        return self._process.exit_code is not None, last_words(self._process)

    async def receive(self, files: SharedFiles, limit_s: float) -> str:
        """As `write_files`."""
        return str(await write_files(files, limit_s))

    async def forget(self, folder: str) -> None:
        """Remove a folder that `receive` made."""
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def stop(self) -> None:
        """End it and what it wrote."""
        if self._process is not None:
            await asyncio.to_thread(self._process.stop)
        shutil.rmtree(self._folder, ignore_errors=True)


class ActorGone(Unreachable):
    """The actor of a server has ended."""


class RayServer:
    """A `Server` behind an actor. Every wait ends, whatever becomes of the actor and its node."""

    is_ours = True

    def __init__(self, index: int, actor: Any, timeout_s: float) -> None:  # Any: Ray's handle
        self.name, self._actor, self._timeout_s = f"#{index}", actor, timeout_s

    async def start(self, arguments: Sequence[str], env: Mapping[str, str], limit_s: float) -> None:
        """Wait for the actor's place, and start its child."""
        address = await self._call(limit_s, "start", list(arguments), dict(env))
        self.name += f" on {address}"

    async def ask(self, path: str, body: Json | None = None, limit_s: float | None = None) -> Reply:
        """As in `Server`."""
        most = self._timeout_s if limit_s is None else limit_s
        status, text = await self._call(most + SPARE_S, "ask", path, body, limit_s)
        if status == 0:
            raise Unreachable(text)
        return Reply(status, text)

    async def has_ended(self) -> bool:
        """As in `Server`."""
        try:
            ended, _ = await self._call(SPARE_S, "state")
        except ActorGone:
            return True
        except Unreachable:
            return False  # busy, perhaps
        return bool(ended)

    async def last_words(self) -> str:
        """As in `Server`."""
        try:
            _, words = await self._call(SPARE_S, "state")
        except (Unreachable, ResourceError) as error:
            return str(error)
        return str(words)

    async def receive(self, name: str, files: SentFiles) -> str:
        """As in `Server`."""
        limit_s = self._timeout_s
        return str(await self._call(limit_s + SPARE_S, "receive", files.shared, limit_s))

    async def forget(self, folder: str) -> None:
        """As in `Server`; the actor's end would do as well."""
        with contextlib.suppress(Unreachable):
            await self._call(SPARE_S, "forget", folder)

    async def stop(self) -> None:
        """As in `Server`; to leave the cluster ends the actors of this process as well."""
        with contextlib.suppress(Unreachable, ResourceError):
            await self._call(STOP_S, "stop")
        if ray.is_initialized() and not is_gone():
            ray.kill(self._actor)

    async def _call(self, limit_s: float, method: str, *args: object) -> Any:  # Any: what it gives
        """What a method of the actor returns. Raises `ResourceError` where the cluster is gone."""
        if not ray.is_initialized():  # else Ray joins some cluster by itself
            raise ActorGone(f"the cluster of {self.name} was left")
        require_cluster()
        reference = getattr(self._actor, method).remote(*args)
        future = asyncio.wrap_future(reference.future())
        until = time.monotonic() + limit_s
        try:
            # This leaves the future alone: Ray gives its answer to it even if nobody waits.
            while not (await asyncio.wait([future], timeout=LOOK_S))[0]:
                require_cluster()
                if time.monotonic() > until:
                    raise Unreachable(f"{self.name} did not answer within {limit_s:g} s")
            return future.result()
        except ray.exceptions.RayTaskError as error:
            raise Unreachable(f"{self.name}: {first_line(error.cause or error)}") from error
        except ray.exceptions.RayError as error:
            raise ActorGone(
                f"the actor of {self.name} is gone: it was killed, or its node left the cluster. "
                f"Ray says: {first_line(error)}"
            ) from error
        finally:
            if not future.done():
                _give_up(future, reference)


def _give_up(future: asyncio.Future[Any], reference: Any) -> None:  # Any: as above
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    if ray.is_initialized() and not is_gone():
        with contextlib.suppress(Exception):  # it only spares the server a request
            ray.cancel(reference)


class RayServers:
    """Places for servers: one bundle each of one placement group."""

    def __init__(self, places: ServerPlaces, timeout_s: float, connections: int) -> None:
        self.places, self._timeout_s, self._connections = places, timeout_s, connections
        self._group: PlacementGroup | None = None

    def place(self, check: Callable[[], None]) -> None:
        """Wait for the places. Raises `ResourceError` where the cluster has no room for them."""
        places, bundle = self.places, self.places.bundle
        limit = places.start_timeout_s
        self._group = placed_within(bundle, places.replicas, limit, check)
        if self._group is None:
            raise no_room(
                f"{places.replicas} vLLM servers",
                bundle,
                limit,
                "cluster.engines.replicas, cluster.engines.cpus or cluster.engines.gpus",
            )

    async def start(
        self, index: int, arguments: Sequence[str], env: Mapping[str, str]
    ) -> RayServer:
        """A server in place `index`, whose child has been started.

        Raises `RunError` where the place is not there within `start_timeout_s`, as after the loss
        of its node.
        """
        if not ray.is_initialized():
            raise ActorGone("the cluster was left")
        path = [folder or os.getcwd() for folder in sys.path]
        actor = (
            ray.remote(ServerActor)
            .options(
                num_cpus=self.places.cpus,
                num_gpus=self.places.gpus,
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=CALLS_AT_ONCE,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=index
                ),
            )
            .remote(path, self._timeout_s, self._connections)
        )
        server = RayServer(index, actor, self._timeout_s)
        try:
            await server.start(arguments, env, self.places.start_timeout_s + ACTOR_START_S)
        except BaseException as error:
            if not is_gone():
                ray.kill(actor)
            if isinstance(error, Unreachable) and not isinstance(error, ActorGone):
                raise Unreachable(
                    f"{error}: no node had room for it, perhaps (cluster.ray.start_timeout_s)"
                ) from error
            raise
        return server

    def close(self) -> None:
        """Give the places back; may be called twice."""
        if self._group is not None and ray.is_initialized() and not is_gone():
            remove_placement_group(self._group)
        self._group = None
