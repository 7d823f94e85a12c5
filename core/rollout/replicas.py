"""Replicas of one model behind servers: their health, their load, and requests over all of them.

A request goes to the replica with the least in flight. When it fails, it is sent again, to another
replica where there is one; when a replica is gone, all that it had goes to the others. An answer is
stored under its request's index, and only then is the request done: nothing is sampled twice into
the result, and as a request carries its own seed, its answer does not depend on who gave it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from posttrain.core.cluster.servers import CONNECT_S, Server
from posttrain.core.errors import ResourceError, RunError
from posttrain.core.rollout.event_loop import EventLoop
from posttrain.core.runtime.http_client import Json, Unreachable, make_client

if TYPE_CHECKING:
    import aiohttp

logger = logging.getLogger(__name__)
T = TypeVar("T")
HEALTH_TIMEOUT_S = 5.0
POLL_S = 0.25
FULL_S = 0.02
# Characters of a server's answer that an error repeats.
SHOWN = 500


@dataclass(slots=True, eq=False)
class Replica:
    """One server. `failures` counts failed requests since its last good one.

    `restarts` counts how often it was started again, `returning` says that it is being.
    """

    server: Server
    index: int = 0
    alive: bool = True
    in_flight: int = 0
    failures: int = 0
    last_failure: str = ""
    restarts: int = 0
    returning: bool = False
    on_loss: Callable[[Replica], None] | None = None

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.server.name

    def lose(self, reason: str) -> None:
        """Send it nothing more; to be called in the loop of its requests."""
        if not self.alive:
            return
        self.alive, self.last_failure = False, reason
        logger.warning("vLLM server %s is lost: %s", self.name, reason)
        if self.on_loss is not None:
            self.on_loss(self)

    async def obituary(self) -> str:
        """What is known of its end: the last failure, exit code and end of its log."""
        said = f"{self.name}: {self.last_failure or 'no answer'}"
        words = await self.server.last_words()
        return f"{said}; {words}" if words else said


async def obituaries(replicas: Sequence[Replica]) -> str:
    return "\n".join(await asyncio.gather(*(replica.obituary() for replica in replicas)))


class LoopThread(EventLoop):
    """An event loop in a thread of its own, with one HTTP client on it."""

    def __init__(self, timeout_s: float, connections: int) -> None:
        super().__init__(patience_s=math.inf, name="vllm-servers")
        self.client: aiohttp.ClientSession = self.run(
            make_client(timeout_s, connections, connect_s=CONNECT_S)
        )

    async def _cancel_all(self) -> None:
        await super()._cancel_all()
        await self.client.close()


async def is_healthy(replica: Replica) -> bool:
    try:
        reply = await replica.server.ask("/health", limit_s=HEALTH_TIMEOUT_S)
    except Unreachable:
        return False
    return reply.status == 200


async def wait_until_ready(replicas: Sequence[Replica], timeout_s: float) -> None:
    """Return when all are healthy. Raises `ResourceError` as soon as one cannot become so."""
    end = time.monotonic() + timeout_s
    waiting = list(replicas)
    while waiting:
        ended = await asyncio.gather(*(replica.server.has_ended() for replica in waiting))
        for replica, gone in zip(waiting, ended, strict=True):
            if gone:
                words = await replica.obituary()
                raise ResourceError(f"a vLLM server ended while it started: {words}")
        healthy = await asyncio.gather(*map(is_healthy, waiting))
        waiting = [r for r, fine in zip(waiting, healthy, strict=True) if not fine]
        if waiting and time.monotonic() > end:
            replica = waiting[0]
            ours = replica.server.is_ours
            raise ResourceError(
                f"no vLLM server answered at {replica.name}/health within {timeout_s:g} s: "
                + ("raise startup_timeout_s" if ours else "check the URL and the server")
                + (f"; {await replica.obituary()}" if ours else "")
            )
        await asyncio.sleep(POLL_S if waiting else 0)


async def post(replica: Replica, path: str, body: Json) -> Json:
    """The JSON answer; one that is not JSON stands under `answer`.

    Raises `RunError` with the server's words when it is not 200.
    """
    try:
        reply = await replica.server.ask(path, body)
    except Unreachable as error:
        raise RunError(f"{replica.name}{path}: {error}") from error
    if reply.status != 200:
        raise RunError(f"{replica.name}{path} answered {reply.status}: {shown(reply.text)}")
    try:
        found = json.loads(reply.text)
    except json.JSONDecodeError:
        found = reply.text
    return found if isinstance(found, dict) else {"answer": found}


def shown(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else f"{line[:SHOWN]} ..."


# Failed requests in a row after which a replica that says it is healthy is given up all the same.
MAX_FAILURES_IN_A_ROW = 8


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_concurrency` requests in flight at each replica, `max_retries` further tries of each."""

    max_concurrency: int
    max_retries: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one try: `answer`, or why there is none; `refused` = trying again is vain."""

    index: int
    replica: Replica
    answer: Json | None = None
    failure: str = ""
    refused: bool = False


async def serve_all(
    replicas: Sequence[Replica], path: str, requests: Sequence[Json], limits: Limits
) -> list[Json]:
    """The answers of `requests`, in order.

    Without a living replica it waits for those that are started again.
    """
    answers: list[Json | None] = [None] * len(requests)
    tries: list[list[Replica]] = [[] for _ in requests]  # where each request failed
    queue = deque(range(len(requests)))
    asked: dict[asyncio.Task[Outcome], Replica] = {}
    try:
        while queue or asked:
            while queue and (replica := _choose(replicas, tries[queue[0]], limits)):
                index = queue.popleft()
                replica.in_flight += 1
                asked[asyncio.create_task(_try(replica, path, requests[index], index))] = replica
            returning = any(replica.returning for replica in replicas)
            alive = any(replica.alive for replica in replicas)
            if not asked and not returning and not alive:
                raise RunError(await _none_left(replicas, len(queue), len(requests)))
            if not asked:  # all is lost and returns, or full of other calls' requests
                await asyncio.sleep(FULL_S if alive else POLL_S)
                continue
            done, _ = await asyncio.wait(
                asked,
                return_when=asyncio.FIRST_COMPLETED,
                timeout=POLL_S if returning else None,
            )
            for task in done:
                asked.pop(task).in_flight -= 1
            for outcome in (task.result() for task in done):
                if outcome.answer is not None:
                    outcome.replica.failures = 0
                    answers[outcome.index] = outcome.answer
                    continue
                await _note_failure(outcome, tries[outcome.index], limits)
                queue.appendleft(outcome.index)
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        for replica in asked.values():  # others may be serving requests of their own there
            replica.in_flight -= 1
    return [answer for answer in answers if answer is not None]


def _choose(
    replicas: Sequence[Replica], failed_at: Sequence[Replica], limits: Limits
) -> Replica | None:
    """The least loaded living replica with room, one where the request has not failed if any."""
    alive = [replica for replica in replicas if replica.alive]
    fresh = [replica for replica in alive if replica not in failed_at]
    open_to_it = [r for r in fresh or alive if r.in_flight < limits.max_concurrency]
    return min(open_to_it, key=lambda replica: replica.in_flight, default=None)


async def _try(replica: Replica, path: str, request: Json, index: int) -> Outcome:
    try:
        reply = await replica.server.ask(path, request)
        if reply.status == 200:
            return Outcome(index, replica, answer=json.loads(reply.text))
    except (Unreachable, json.JSONDecodeError) as error:
        return Outcome(index, replica, failure=str(error))
    failure = f"it answered {reply.status}: {shown(reply.text)}"
    return Outcome(index, replica, failure=failure, refused=reply.status < 500)


async def _note_failure(outcome: Outcome, failed_at: list[Replica], limits: Limits) -> None:
    """Give up the replica if it is gone, the run if the request can have no answer."""
    replica = outcome.replica
    if outcome.refused:
        raise RunError(
            f"the vLLM server {replica.name} refused a request: {outcome.failure}: its version or "
            "its options do not fit; docs/engines.md has the command that starts one"
        )
    failed_at.append(replica)
    replica.failures += 1
    replica.last_failure = outcome.failure
    if replica.alive and (
        replica.failures >= MAX_FAILURES_IN_A_ROW or not await is_healthy(replica)
    ):
        replica.lose(outcome.failure)
    if replica.alive and len(failed_at) > limits.max_retries:
        raise RunError(
            f"a request failed {len(failed_at)} times at vLLM servers that say they are healthy, "
            f"last at {await replica.obituary()}"
        )


async def _none_left(replicas: Sequence[Replica], unfinished: int, total: int) -> str:
    return (
        f"no vLLM server is left ({len(replicas)} at the start), {unfinished} of {total} responses "
        "are unfinished: fix what ended them and start the run again, which resumes\n"
        f"{await obituaries(replicas)}"
    )
