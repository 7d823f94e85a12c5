"""Groups that are sampled without an end while the policy is trained, a bounded number at once.

Weights change between two calls of the engine, so a group may hold tokens of several policies. The
step that needs groups takes the first that are done; which they are is for a log to keep.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from posttrain.core.contracts import PromptGroup, SampledGroup
from posttrain.core.rollout.plays import Plays, first_of
from posttrain.core.rollout.submitting import Submitting
from posttrain.core.runtime.seeding import derive_seed
from posttrain.core.runtime.waiting import POLL_S
from posttrain.core.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Taken:
    """Groups for a step, in the order in which they were done, and what there is to say of it."""

    groups: Sequence[SampledGroup]
    metrics: Mapping[str, float]


class GroupStream:
    """Samples group after group; `most` are under way or wait to be taken.

    Group n is of the n-th prompt, and its seed follows from n alone.
    """

    def __init__(
        self,
        plays: Plays,
        submitting: Submitting,
        prompt: Callable[[int], PromptGroup],
        params: SamplingParams,
        most: int,
    ) -> None:
        self.plays, self.submitting, self.most = plays, submitting, most
        self._prompt, self._params = prompt, params
        self._next = 0
        self._again: deque[int] = deque()
        self._under_way: set[int] = set()
        self._done: deque[tuple[int, SampledGroup]] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._producer: asyncio.Task[None] | None = None
        self._more: asyncio.Event | None = None
        self._dropped = 0
        self._since = time.perf_counter()

    # -- the step's side --------------------------------------------------------------------

    def take(self, count: int, oldest: int, check: Callable[[], None]) -> Taken:
        """The first `count` groups that are done, none with a token of a policy before `oldest`.

        Older ones are sampled once more. Raises what sampling raised, and what `check` raises.
        """
        self._start()
        began = time.perf_counter()
        with self._changed:
            waiting = len(self._done)
            while True:
                check()
                if self._error is not None:
                    raise self._error
                self._drop_before(oldest)
                if len(self._done) >= count:
                    break
                self._changed.wait(POLL_S)
            taken = [self._done.popleft()[1] for _ in range(count)]
            metrics = self._metrics(waiting, began)
        self._wake()
        self.plays.refuse_failures(taken)
        return Taken(taken, metrics)

    def _drop_before(self, oldest: int) -> None:
        kept: deque[tuple[int, SampledGroup]] = deque()
        for number, group in self._done:
            if min(c.oldest_version for c in group.completions) >= oldest:
                kept.append((number, group))
            else:
                self._again.append(number)
                self._dropped += 1
        if len(kept) < len(self._done):
            self._done = kept
            self._wake()

    def _metrics(self, waiting: int, began: float) -> dict[str, float]:
        now = time.perf_counter()
        busy, self.submitting.busy_s = self.submitting.busy_s, 0.0
        calls = self.submitting.engine.calls_at_once
        found = {
            "stream/groups_waiting": float(waiting),
            "stream/groups_under_way": float(len(self._under_way)),
            "stream/groups_dropped": float(self._dropped),
            "stream/engine_busy_frac": min(1.0, busy / max(1e-9, now - self._since) / calls),
            "time/stream_wait_s": now - began,
        }
        self._dropped, self._since = 0, now
        return found

    def state(self) -> dict[str, Any]:  # Any: JSON
        """Which groups are still to be taken."""
        with self._changed:
            started = [*self._again, *self._under_way, *(number for number, _ in self._done)]
            return {"next": self._next, "again": sorted(started)}

    def load_state(self, state: Mapping[str, Any]) -> None:  # Any: JSON
        """Stand where `state` was taken; before the first group is taken."""
        assert self._producer is None, "it samples already"
        self._next, self._again = int(state["next"]), deque(map(int, state["again"]))

    def close(self) -> None:
        """Sample nothing more."""
        producer, self._producer = self._producer, None
        if producer is not None:
            self.plays.loop.call_soon_threadsafe(producer.cancel)
        self.submitting.close()

    # -- the sampling side ------------------------------------------------------------------

    def _start(self) -> None:
        if self._producer is None:
            started = asyncio.run_coroutine_threadsafe(self._begin(), self.plays.loop)
            started.result()

    async def _begin(self) -> None:
        self._more = asyncio.Event()
        self._producer = asyncio.get_running_loop().create_task(self._produce())

    def _wake(self) -> None:
        if self._more is not None:
            self.plays.loop.call_soon_threadsafe(self._more.set)

    async def _produce(self) -> None:
        assert self._more is not None
        room = asyncio.Semaphore(self.plays.limits.at_once)
        running: set[asyncio.Task[None]] = set()
        try:
            while True:
                self._more.clear()
                with self._changed:
                    free = self.most - len(self._under_way) - len(self._done)
                for _ in range(free):
                    running.add(asyncio.create_task(self._sample(self._number(), room)))
                more = asyncio.create_task(self._more.wait())
                try:
                    done, _ = await asyncio.wait(
                        {*running, more}, return_when=asyncio.FIRST_COMPLETED
                    )
                finally:
                    more.cancel()
                for task in done & running:
                    task.result()
                running -= done
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            with self._changed:
                self._error = first_of(error)
                self._changed.notify_all()
        finally:
            for task in running:
                task.cancel()

    def _number(self) -> int:
        with self._changed:
            if self._again:
                number = self._again.popleft()
            else:
                number, self._next = self._next, self._next + 1
            self._under_way.add(number)
            return number

    async def _sample(self, number: int, room: asyncio.Semaphore) -> None:
        seed = derive_seed(self._params.seed, "stream", number)
        params = replace(self._params, seed=seed)
        group = await self.plays.group(self.submitting, self._prompt(number), params, room)
        with self._changed:
            self._under_way.remove(number)
            self._done.append((number, group))
            self._changed.notify_all()
