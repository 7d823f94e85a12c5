"""Spreads requests over replicas: each is answered once, whatever happens to the servers.

A request goes to the replica with the least in flight. When it fails, it is sent again, to another
replica where there is one; when a replica is gone, all that it had goes to the others. An answer is
stored under its request's index, and only then is the request done: nothing is sampled twice into
the result, and as a request carries its own seed, its answer does not depend on who gave it.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from posttrain.core.errors import RunError
from posttrain.core.serving.replicas import Json, Replica, is_healthy, shown

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
        f"are unfinished: mend what ended them and start the run again, which resumes\n{ends}"
    )
