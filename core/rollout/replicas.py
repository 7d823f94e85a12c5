"""Replicas of one model behind HTTP: their health, their load, and requests over all of them.

A request goes to the replica with the least in flight. When it fails, it is sent again, to another
replica where there is one; when a replica is gone, all that it had goes to the others. An answer is
stored under its request's index, and only then is the request done: nothing is sampled twice into
the result, and as a request carries its own seed, its answer does not depend on who gave it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from posttrain.core.errors import ResourceError, RunError
from posttrain.core.runtime.processes import ServerProcess

logger = logging.getLogger(__name__)
T = TypeVar("T")
Json = dict[str, Any]  # Any: JSON
HEALTH_TIMEOUT_S = 5.0
POLL_S = 0.25
# Characters of a server's answer that an error repeats.
SHOWN = 500


@dataclass(slots=True)
class Replica:
    """One server. `failures` counts failed requests since its last good one."""

    url: str
    process: ServerProcess | None = None  # None: given by URL, not ours
    alive: bool = True
    in_flight: int = 0
    failures: int = 0
    last_failure: str = ""

    def lose(self, reason: str) -> None:
        """Use it no more. A server of ours is ended, so that it holds no memory."""
        if not self.alive:
            return
        self.alive, self.last_failure = False, reason
        logger.warning("vLLM server %s is lost: %s", self.url, reason)
        if self.process is not None:
            self.process.begin_stop()

    def obituary(self) -> str:
        """What is known of its end: the last failure, exit code and end of its log."""
        said = f"{self.url}: {self.last_failure or 'no answer'}"
        if self.process is None:
            return said
        code = self.process.exit_code
        ended = "" if code is None else f"; exit code {code}"
        return f"{said}{ended}; last lines of {self.process.log}:\n{self.process.log_tail()}"


class LoopThread:
    """An event loop in a thread of its own, with one HTTP client on it."""

    def __init__(self, timeout_s: float, connections: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="vllm-servers", daemon=True
        )
        self._thread.start()
        self.client: httpx.AsyncClient = self.run(_client(timeout_s, connections))

    def run(self, work: Coroutine[Any, Any, T]) -> T:  # Any: send and yield types
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _cancel_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self.client.aclose()


async def _client(timeout_s: float, connections: int) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        timeout=httpx.Timeout(timeout_s, connect=HEALTH_TIMEOUT_S, pool=None),
        limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
        trust_env=False,  # a proxy between us and the loopback address helps nobody
    )


async def is_healthy(client: httpx.AsyncClient, replica: Replica) -> bool:
    try:
        answer = await client.get(f"{replica.url}/health", timeout=HEALTH_TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL):
        return False
    return answer.status_code == 200


async def wait_until_ready(
    client: httpx.AsyncClient, replicas: Sequence[Replica], timeout_s: float
) -> None:
    """Return when all are healthy. Raises `ResourceError` as soon as one cannot become so."""
    end = time.monotonic() + timeout_s
    waiting = list(replicas)
    while waiting:
        for replica in waiting:
            process = replica.process
            if process is not None and process.exit_code is not None:
                raise ResourceError(f"a vLLM server ended while it started: {replica.obituary()}")
        healthy = await asyncio.gather(*(is_healthy(client, replica) for replica in waiting))
        waiting = [r for r, fine in zip(waiting, healthy, strict=True) if not fine]
        if waiting and time.monotonic() > end:
            replica = waiting[0]
            ours = replica.process is not None
            raise ResourceError(
                f"no vLLM server answered at {replica.url}/health within {timeout_s:g} s: "
                + ("raise startup_timeout_s" if ours else "check the URL and the server")
                + (f"; {replica.obituary()}" if ours else "")
            )
        await asyncio.sleep(POLL_S if waiting else 0)


async def post(client: httpx.AsyncClient, replica: Replica, path: str, body: Json) -> Json:
    """The JSON answer. Raises `RunError` with the server's words when it is not 200."""
    try:
        answer = await client.post(f"{replica.url}{path}", json=body)
    except httpx.HTTPError as error:
        raise RunError(f"{replica.url}{path}: {type(error).__name__} {error}") from error
    if answer.status_code != 200:
        raise RunError(f"{replica.url}{path} answered {answer.status_code}: {shown(answer.text)}")
    found = (
        answer.json()
        if answer.headers.get("content-type", "").startswith("application/json")
        else {}
    )
    return found if isinstance(found, dict) else {"answer": found}


async def post_to_all(
    client: httpx.AsyncClient, replicas: Sequence[Replica], path: str, body: Json
) -> list[Json | RunError]:
    """What each replica answered, in order; a failure is returned, so that all are waited for."""
    answers = await asyncio.gather(
        *(post(client, replica, path, body) for replica in replicas), return_exceptions=True
    )
    found: list[Json | RunError] = []
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, RunError):
            raise answer
        found.append(answer)
    return found


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
    client: httpx.AsyncClient,
    replicas: Sequence[Replica],
    path: str,
    requests: Sequence[Json],
    limits: Limits,
) -> list[Json]:
    """The answers of `requests`, in order."""
    answers: list[Json | None] = [None] * len(requests)
    tries: list[list[str]] = [[] for _ in requests]  # URLs where each request failed
    queue = deque(range(len(requests)))
    running: set[asyncio.Task[Outcome]] = set()
    try:
        while queue or running:
            while queue and (replica := _choose(replicas, tries[queue[0]], limits)):
                index = queue.popleft()
                replica.in_flight += 1
                work = _try(client, replica, path, requests[index], index)
                running.add(asyncio.create_task(work))
            if not running:
                raise RunError(_none_left(replicas, len(queue), len(requests)))
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for outcome in (task.result() for task in done):
                outcome.replica.in_flight -= 1
                if outcome.answer is not None:
                    outcome.replica.failures = 0
                    answers[outcome.index] = outcome.answer
                    continue
                await _note_failure(client, outcome, tries[outcome.index], limits)
                queue.appendleft(outcome.index)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for replica in replicas:
            replica.in_flight = 0
    return [answer for answer in answers if answer is not None]


def _choose(replicas: Sequence[Replica], failed_at: list[str], limits: Limits) -> Replica | None:
    """The least loaded living replica with room, one where the request has not failed if any."""
    alive = [replica for replica in replicas if replica.alive]
    fresh = [replica for replica in alive if replica.url not in failed_at]
    open_to_it = [r for r in fresh or alive if r.in_flight < limits.max_concurrency]
    return min(open_to_it, key=lambda replica: replica.in_flight, default=None)


async def _try(
    client: httpx.AsyncClient, replica: Replica, path: str, request: Json, index: int
) -> Outcome:
    try:
        response = await client.post(f"{replica.url}{path}", json=request)
        if response.status_code == 200:
            return Outcome(index, replica, answer=response.json())
    except (httpx.HTTPError, json.JSONDecodeError) as error:
        return Outcome(index, replica, failure=f"{type(error).__name__} {error}".strip())
    failure = f"it answered {response.status_code}: {shown(response.text)}"
    return Outcome(index, replica, failure=failure, refused=response.status_code < 500)


async def _note_failure(
    client: httpx.AsyncClient, outcome: Outcome, failed_at: list[str], limits: Limits
) -> None:
    """Give up the replica if it is gone, the run if the request can have no answer."""
    replica = outcome.replica
    if outcome.refused:
        raise RunError(
            f"the vLLM server {replica.url} refused a request: {outcome.failure}: its version or "
            "its options do not fit; docs/engines.md has the command that starts one"
        )
    failed_at.append(replica.url)
    replica.failures += 1
    replica.last_failure = outcome.failure
    if replica.alive and (
        replica.failures >= MAX_FAILURES_IN_A_ROW or not await is_healthy(client, replica)
    ):
        replica.lose(outcome.failure)
    if replica.alive and len(failed_at) > limits.max_retries:
        raise RunError(
            f"a request failed {len(failed_at)} times at vLLM servers that say they are healthy, "
            f"last at {replica.obituary()}"
        )


def _none_left(replicas: Sequence[Replica], unfinished: int, total: int) -> str:
    ends = "\n".join(replica.obituary() for replica in replicas)
    return (
        f"no vLLM server is left ({len(replicas)} at the start), {unfinished} of {total} responses "
        f"are unfinished: fix what ended them and start the run again, which resumes\n{ends}"
    )
