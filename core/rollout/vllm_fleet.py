"""Several vLLM servers of one model, used as one: started or given, asked, synced, stopped.

A server that is lost, or that does not take what all others take, gets no more requests. One that
the run started is started again in the background, and is asked again once it holds what the others
hold and answers as they do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from posttrain.core.cluster.servers import HttpServer, SentFiles, Server
from posttrain.core.contracts import EngineSetup
from posttrain.core.errors import PosttrainError, RunError
from posttrain.core.rollout.replicas import (
    Limits,
    LoopThread,
    Replica,
    is_healthy,
    obituaries,
    post,
    serve_all,
    wait_until_ready,
)
from posttrain.core.rollout.vllm_server import (
    MODEL_NAME,
    PATH,
    check_architecture,
    check_given_servers,
    get_json,
    read_scores,
    scoring_request,
)
from posttrain.core.runtime.http_client import Json

logger = logging.getLogger(__name__)
StartServer = Callable[[int], Awaitable[Server]]

# A prompt whose log-probs all replicas must agree on after a sync.
PROBE = tuple(range(1, 17))
# float32, bfloat16: one build on one machine gives equal numbers, other kernels these differences.
PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
CACHE_RESET_TRIES = 40
POLL_S = 0.25
RESTART_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """Timeouts (seconds) and counts; see the engine's config."""

    startup_timeout_s: float
    request_timeout_s: float
    requests: Limits
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Held:
    """What the replicas hold: weights, or those they were started with, and an adapter on top.

    `scores` are the log-probs of the probe that all of them gave.
    """

    weights: SentFiles | None = None
    adapter: tuple[str, SentFiles] | None = None
    scores: list[float] = field(default_factory=list)


class VllmFleet:
    """Replicas that hold the same weights. Used by one thread at a time."""

    def __init__(self, count: int, limits: FleetLimits, dtype: str, sync_dir: Path | None) -> None:
        self.limits, self.dtype = limits, dtype
        self.folder = Path(tempfile.mkdtemp(prefix="posttrain-vllm-", dir=sync_dir))
        self.replicas: list[Replica] = []
        self.version = ""
        self._base_name = MODEL_NAME
        self._held = Held()
        self._start_server: StartServer | None = None
        # Held by what changes the weights of replicas, and by one that returns.
        self._changing = asyncio.Lock()
        self._adapters: dict[tuple[Replica, str], str] = {}
        self._returns: set[asyncio.Task[None]] = set()
        self.loop = LoopThread(
            limits.request_timeout_s, 4 + count * limits.requests.max_concurrency
        )

    @property
    def model_name(self) -> str:
        """What requests call the model: the base weights, or the adapter in use."""
        adapter = self._held.adapter
        return self._base_name if adapter is None else adapter[0]

    def start_servers(self, count: int, start: StartServer) -> None:
        """Start `count` servers, each by `start(index)`, and wait until they answer."""

        async def begin() -> None:
            self._start_server = start
            servers = await asyncio.gather(*map(start, range(count)), return_exceptions=True)
            for index, server in enumerate(servers):
                if not isinstance(server, BaseException):
                    self.replicas.append(Replica(server, index, on_loss=self._lost))
            for failure in servers:
                if isinstance(failure, BaseException):
                    raise failure
            await self._wait()
            if count > 1:
                self._held = replace(
                    self._held, scores=await self._agreed(self._alive(), self._held)
                )

        self.loop.run(begin())

    def use_given(self, urls: Sequence[str], setup: EngineSetup, lora: bool) -> None:
        """Wait for the servers given by URL and check that they fit the run."""
        client = self.loop.client
        servers = [HttpServer(url.rstrip("/"), client) for url in urls]
        self.replicas = [Replica(server, index) for index, server in enumerate(servers)]

        async def look() -> None:
            await self._wait()
            await check_given_servers(self.replicas, setup, lora)
            served = await get_json(self.replicas[0], "/v1/models")
            self._base_name = str(served["data"][0]["id"])
            for replica in self.replicas:
                answer = await post(
                    replica, "/collective_rpc", {"method": "posttrain_architecture"}
                )
                check_architecture(replica, answer["results"][0], setup)

        self.loop.run(look())

    async def _wait(self) -> None:
        await wait_until_ready(self.replicas, self.limits.startup_timeout_s)
        found = await get_json(self.replicas[0], "/version")
        self.version = str(found["version"])

    def complete(self, requests: Sequence[Json]) -> list[Json]:
        return self.loop.run(serve_all(self.replicas, PATH, requests, self.limits.requests))

    def _alive(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.alive]

    async def _some_alive(self) -> None:
        """Wait for a replica that is started again, if all are lost."""
        while not self._alive():
            if not any(replica.returning for replica in self.replicas):
                ends = await obituaries(self.replicas)
                raise RunError(
                    f"no vLLM server is left: start the run again, which resumes\n{ends}"
                )
            await asyncio.sleep(POLL_S)

    # -- what the replicas hold ---------------------------------------------------------------

    def load_weights(self, files: SentFiles, check: Callable[[], None] = lambda: None) -> None:
        """Give all replicas the weights in `files`, without an adapter, and check that they do.

        One that does not take them, or that answers otherwise than most, gets no more requests and
        a warning says so. Raises `RunError` when none takes them, or when as many answer one way as
        another: then none may be asked before the next sync.
        """
        self.loop.run(self._change(Held(files), self._replace_weights), check)

    def load_adapter(self, name: str, files: SentFiles) -> None:
        """Load the adapter in `files` as model `name` everywhere, and use it; as `load_weights`."""
        held = replace(self._held, adapter=(name, files), scores=[])
        self.loop.run(self._change(held, self._give_adapter))

    async def _change(
        self, held: Held, give: Callable[[Replica, Held], Coroutine[Any, Any, None]]
    ) -> None:
        while True:
            await self._some_alive()
            async with self._changing:
                replicas = self._alive()
                given = await self._each(replicas, lambda replica: give(replica, held))
                if not given:
                    continue  # they are gone, and those that return do so with the old weights
                scores = await self._agreed(given, held)
                before, self._held = self._held.adapter, replace(held, scores=scores)
                if before is not None:
                    await asyncio.gather(*(self._unload(r, before[0]) for r in self._alive()))
                return

    async def _each(
        self, replicas: Sequence[Replica], work: Callable[[Replica], Coroutine[Any, Any, None]]
    ) -> list[Replica]:
        """Those of `replicas` where `work` succeeded; the others are lost.

        Raises `RunError` when it failed at all of them and some are in good health: then it is not
        their fault.
        """
        results = await asyncio.gather(*map(work, replicas), return_exceptions=True)
        failed: list[tuple[Replica, Exception]] = []
        for replica, result in zip(replicas, results, strict=True):
            if isinstance(result, PosttrainError):
                failed.append((replica, result))
            elif isinstance(result, BaseException):
                raise result
        healthy = await asyncio.gather(*(is_healthy(replica) for replica, _ in failed))
        blameless = [pair for pair, fine in zip(failed, healthy, strict=True) if fine]
        if len(failed) == len(replicas) and blameless:
            raise RunError(
                f"weight sync failed at {len(failed)} of {len(replicas)} vLLM server(s): "
                f"{blameless[0][1]}"
            )
        for replica, error in failed:
            replica.lose(str(error))
        return [replica for replica in replicas if replica.alive]

    async def _replace_weights(self, replica: Replica, held: Held) -> None:
        if self._held.adapter is not None:
            await self._unload(replica, self._held.adapter[0])
        await self._give_weights(replica, held)

    async def _give_weights(self, replica: Replica, held: Held) -> None:
        if (files := held.weights) is None:
            return  # those that it was started with
        folder = await replica.server.receive("weights", files)
        try:
            arguments = {"folder": folder, "digest": files.digest}
            body: Json = {"method": "posttrain_reload", "kwargs": arguments}
            answer = await post(replica, "/collective_rpc", body)
        finally:
            await replica.server.forget(folder)
        for result in answer.get("results") or [{"error": "no worker answered"}]:
            if "error" in result:
                raise RunError(f"{replica.name}: {result['error']}")
            if result.get("digest") != files.digest:
                raise RunError(f"{replica.name} does not say that it holds {files.digest[:12]}")
        await _reset_cache(replica)

    async def _give_adapter(self, replica: Replica, held: Held) -> None:
        if held.adapter is None:
            return
        name, files = held.adapter
        folder = await replica.server.receive(name, files)
        self._adapters[replica, name] = folder  # vLLM may read it again
        await post(replica, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})

    async def _unload(self, replica: Replica, name: str) -> None:
        """Let the server forget an adapter that no request asks for again."""
        folder = self._adapters.pop((replica, name), None)
        if folder is not None:
            with contextlib.suppress(RunError):
                await post(replica, "/v1/unload_lora_adapter", {"lora_name": name})
            await replica.server.forget(folder)

    async def _scores(self, replica: Replica, held: Held) -> list[float]:
        name = self._base_name if held.adapter is None else held.adapter[0]
        return read_scores(await post(replica, PATH, scoring_request(name, PROBE)), PROBE)

    async def _agreed(self, replicas: Sequence[Replica], held: Held) -> list[float]:
        """The log-probs of the probe that most of `replicas` give; the others are lost."""
        rows: dict[Replica, list[float]] = {}

        async def score(replica: Replica) -> None:
            rows[replica] = await self._scores(replica, held)

        given = await self._each(replicas, score)
        if not given:
            raise RunError("all vLLM servers were lost in a weight sync: start the run again")
        like = {
            one: [other for other in given if self._gap(rows[one], rows[other]) <= self._tolerance]
            for one in given
        }
        best = max(given, key=lambda replica: len(like[replica]))
        odd = [replica for replica in given if replica not in like[best]]
        if not odd:
            return rows[best]
        gap = self._gap(rows[best], rows[odd[0]])
        what = (
            f"after a sync the vLLM servers {best.name} and {odd[0].name} differ by {gap:.4f} nats "
            f"on the same tokens, expected at most {self._tolerance}"
        )
        if 2 * len(like[best]) <= len(given):
            raise RunError(f"{what}: one of them has other weights; restart the run")
        for replica in odd:
            replica.lose(f"{what}, as most do")
        return rows[best]

    @property
    def _tolerance(self) -> float:
        return PROBE_TOLERANCE[self.dtype]

    def _gap(self, one: Sequence[float], other: Sequence[float]) -> float:
        gap = max(abs(a - b) for a, b in zip(one, other, strict=True))
        return gap if gap == gap else float("inf")

    # -- servers that are started again -------------------------------------------------------

    def _lost(self, replica: Replica) -> None:
        """A server of ours: start it again in the background."""
        replica.returning = replica.restarts < self.limits.restarts
        task = asyncio.get_running_loop().create_task(self._bring_back(replica))
        self._returns.add(task)
        task.add_done_callback(self._returns.discard)

    async def _bring_back(self, replica: Replica) -> None:
        try:
            while replica.restarts < self.limits.restarts:
                replica.restarts += 1
                which = f"{replica.restarts} of {self.limits.restarts}"
                try:
                    await self._start_again(replica)
                except PosttrainError as error:
                    replica.last_failure = str(error)
                    logger.warning(
                        "vLLM server %s: restart %s failed: %s", replica.name, which, error
                    )
                    await asyncio.sleep(RESTART_PAUSE_S * replica.restarts)
                else:
                    logger.warning(
                        "vLLM server %s is back, with the weights of the others (restart %s)",
                        replica.name,
                        which,
                    )
                    return
            await replica.server.stop()  # so that it holds no memory
        finally:
            replica.returning = False

    async def _start_again(self, replica: Replica) -> None:
        assert self._start_server is not None
        await replica.server.stop()
        for key in [key for key in self._adapters if key[0] is replica]:
            del self._adapters[key]
        replica.server = await self._start_server(replica.index)
        await wait_until_ready([replica], self.limits.startup_timeout_s)
        async with self._changing:
            held = self._held
            await self._give_weights(replica, held)
            await self._give_adapter(replica, held)
            scores = await self._scores(replica, held)
            gap = self._gap(scores, held.scores) if held.scores else 0.0
            if gap > self._tolerance:
                raise RunError(
                    f"it answers with other weights than the others: the probe differs by "
                    f"{gap:.4f} nats, expected at most {self._tolerance}"
                )
            replica.failures, replica.alive = 0, True

    # -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the servers that are ours. Logs stay when one was lost."""
        if self.replicas:
            self.loop.run(self._stop())
        self.loop.close()
        if all(replica.alive for replica in self.replicas):
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            for path in self.folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
        self.replicas = []

    async def _stop(self) -> None:
        for task in self._returns:
            task.cancel()
        await asyncio.gather(*self._returns, return_exceptions=True)
        await asyncio.gather(*(replica.server.stop() for replica in self.replicas))


async def _reset_cache(replica: Replica) -> None:
    """Keys and values of the old weights must not serve the new ones."""
    for _ in range(CACHE_RESET_TRIES):
        answer = await post(replica, "/reset_prefix_cache", {})
        if answer.get("success"):
            return
        await asyncio.sleep(POLL_S)  # requests that were given up still hold blocks
    raise RunError(f"{replica.name} kept its prefix cache after a weight sync")


def local_server(
    arguments: Sequence[str], environments: Sequence[Mapping[str, str]], fleet: VllmFleet
) -> StartServer:
    """Starts servers of this machine, each in its environment; logs are in the fleet's folder."""
    count = [0] * len(environments)

    async def start(index: int) -> Server:
        again = f"-{count[index]}" if count[index] else ""
        count[index] += 1
        log = fleet.folder / f"server-{index}{again}.log"
        return HttpServer.started(arguments, dict(environments[index]), log, fleet.loop.client)

    return start
