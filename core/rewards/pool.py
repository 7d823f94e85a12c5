"""`ScorePool`: rewards scored in worker processes that can be killed and replaced at any moment.

A sample that takes too long, or whose worker dies, gets a status and no value; the worker is killed
with everything it started, another takes its place, and the samples that waited behind it are
scored elsewhere. Each call ends: every sample has a limit, and every wait looks at the stop signal.
"""

from __future__ import annotations

import os
import selectors
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Self

from posttrain.core.contracts import Reward, RewardContext
from posttrain.core.errors import RunError
from posttrain.core.rewards.protocol import BadFrame, Closed, Job, PoolSetup
from posttrain.core.rewards.workers import (
    START_LIMIT_S,
    ForkServerProcess,
    ServerLost,
    WorkerHandle,
    ending,
)
from posttrain.core.types import RewardSample, Score

MAX_WORKERS = 8
MAX_STARTS_LOST = 3
"""Workers, or servers, in a row that may die before they score anything."""
_AT_ONCE = 32  # samples per message, at most
_SPARES = 2
_TICK_S = 0.2


def default_workers() -> int:
    """As many workers as this process may use cores, at most `MAX_WORKERS`."""
    return min(MAX_WORKERS, len(os.sched_getaffinity(0)))


def limits_of(rewards: Sequence[Reward[Any]], timeout_s: float) -> list[float]:
    """Seconds that one sample may take, for each reward."""
    return [max(timeout_s, reward.time_limit_s() or 0.0) for reward in rewards]


class ScorePool:
    """Scores samples with the rewards of `setup` in worker processes; a context manager.

    `limits` are seconds that one sample may take in each reward, from the moment its scoring
    begins. `check` is called while waiting and may raise. Scores come in the order of the samples.
    """

    def __init__(
        self,
        setup: PoolSetup,
        limits: Sequence[float],
        workers: int,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.setup, self.limits = setup, list(limits)
        self.num_workers = workers
        self.samples_per_s = 0.0
        self.replaced = 0
        """Workers lost so far."""
        self._check = check
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._server: ForkServerProcess | None = None
        self._workers: dict[int, WorkerHandle] = {}
        self._pending: deque[Job] = deque()
        self._results: dict[int, Score] = {}
        self._returned: set[int] = set()  # jobs that a worker died with before it began
        self._numbers = 0
        self._starts_lost = 0
        self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process of the pool; may be called twice."""
        for worker in list(self._workers.values()):
            self._forget(worker)
        self._drop_server()
        self._pending.clear()
        self._results.clear()

    def score(self, samples: Sequence[RewardSample]) -> list[list[Score]]:
        """For each reward its scores of `samples`, in order."""
        with self._lock:
            jobs = [
                Job(self._next_number(), reward, sample)
                for reward in range(len(self.limits))
                for sample in samples
            ]
            server = self.wait_ready()
            began = time.monotonic()
            try:
                self._run(server, jobs)
            except BaseException:
                self.close()  # what still runs has no reader any more
                raise
            self.samples_per_s = len(jobs) / max(1e-9, time.monotonic() - began)
            found = [self._results.pop(job.number) for job in jobs]
            self._returned.clear()
        return [found[i * len(samples) : (i + 1) * len(samples)] for i in range(len(self.limits))]

    def _start(self) -> ForkServerProcess:
        server = ForkServerProcess(self.setup)
        self._selector.register(server.control, selectors.EVENT_READ)
        self._server = server
        return server

    def wait_ready(self) -> ForkServerProcess:
        """Wait until the rewards' modules are imported. Raises `RunError` where they cannot be."""
        server = self._server or self._start()
        try:
            server.wait_ready(self._check)
        except BaseException:
            self.close()
            raise
        return server

    def _run(self, server: ForkServerProcess, jobs: Sequence[Job]) -> None:
        self._pending.extend(jobs)
        last = 0.0
        while len(self._results) < len(jobs):
            try:
                self._fill(server)
                self._listen(server)
                self._expire(server)
            except ServerLost:
                server = self._restart(server)
            if time.monotonic() - last > _TICK_S:
                self._check()
                last = time.monotonic()

    def _fill(self, server: ForkServerProcess) -> None:
        """Have as many workers as there should be, and give work to those without any."""
        alive = [worker for worker in self._workers.values() if not worker.is_closing]
        outstanding = len(self._pending) + sum(len(worker.jobs) for worker in alive)
        # Once one was lost, spares are forked while the others work: no sample waits for a fork.
        spare = _SPARES if self.replaced else 0
        for _ in range(min(self.num_workers + spare, outstanding) - len(alive)):
            number = self._next_number()
            worker = WorkerHandle(number, server.spawn(number), self.limits)
            self._workers[number] = worker
            self._selector.register(worker.sock, selectors.EVENT_READ, worker)
        idle = [worker for worker in alive if worker.wants_work]
        busy = sum(bool(worker.jobs) for worker in alive)
        for worker in idle[: max(0, self.num_workers - busy)]:
            if self._pending:
                # Small shares towards the end, so that all workers end together.
                fair = len(self._pending) // (2 * self.num_workers)
                share = max(1, min(_AT_ONCE, fair))
                try:
                    worker.give([self._pending.popleft() for _ in range(share)])
                except Closed:
                    self._end(server, worker, "its process took no work")

    def _listen(self, server: ForkServerProcess) -> None:
        """Wait for the next event, at most until a limit is reached, and take in what came."""
        now = time.monotonic()
        deadlines = [worker.deadline() - now for worker in self._workers.values()]
        ended: list[dict[str, object]] = []
        for key, _ in self._selector.select(max(0.0, min([_TICK_S, *deadlines]))):
            if key.data is None:
                ended = server.messages()
            else:
                self._read(server, key.data)
        for fields in ended:
            worker = self._workers.get(int(str(fields.get("ended", -1))))
            if worker is not None:
                if not worker.is_closing:  # its last words still lie in the socket
                    self._read(server, worker)
                self._lost(worker, worker.fault or ending(int(str(fields["code"]))))

    def _read(self, server: ForkServerProcess, worker: WorkerHandle) -> None:
        """Take in a worker's scores; one that broke the protocol or closed its channel is ended."""
        try:
            found, is_open = worker.read()
        except BadFrame as error:
            self._end(server, worker, f"its process wrote into the pool's channel: {error}")
            return
        if found:
            self._starts_lost = 0
            self._results.update(found)
        if not is_open:
            self._end(server, worker, "")

    def _end(self, server: ForkServerProcess, worker: WorkerHandle, fault: str) -> None:
        worker.begin_closing(fault)
        self._selector.unregister(worker.sock)
        server.kill(worker.number)

    def _lost(self, worker: WorkerHandle, how: str) -> None:
        """Blame the sample that was being scored, and have the others scored elsewhere."""
        if worker.pid is None:
            self._starts_lost += 1
            if self._starts_lost >= MAX_STARTS_LOST:
                raise RunError(
                    f"{self._starts_lost} workers of the reward pool died while they built their "
                    f"rewards: {how}; look at the rewards' __init__ and setup"
                )
        # Work that was given to a worker as it died is not to blame, unless it happens again.
        first = worker.jobs[0].number if worker.jobs else None
        if not worker.has_begun and first is not None and first not in self._returned:
            self._returned.add(first)
            self._forget(worker)
        else:
            self._forget(worker, Score(None, "crashed", how))

    def _expire(self, server: ForkServerProcess) -> None:
        """Kill workers whose sample is over its limit, unless its score has just come."""
        for worker in list(self._workers.values()):
            if worker.is_closing:
                if time.monotonic() >= worker.deadline():
                    self._lost(worker, worker.fault or "its process closed the pool's channel")
                continue
            if time.monotonic() < worker.deadline():
                continue
            self._read(server, worker)
            if worker.is_closing or time.monotonic() < worker.deadline():
                continue
            server.kill(worker.number)
            if worker.pid is None:
                self._lost(worker, f"its process was not ready within {START_LIMIT_S:.0f} s")
            else:
                late = f"no score within {worker.limit():g} s"
                self._forget(worker, Score(None, "timeout", late))

    def _forget(self, worker: WorkerHandle, blame: Score | None = None) -> None:
        """Drop a worker. `blame` is the score of the sample that was being scored; the others that
        it held go to the front of the queue."""
        self.replaced += 1
        if worker.jobs and blame is not None:
            self._results[worker.jobs.popleft().number] = blame
        self._pending.extendleft(reversed(worker.jobs))
        del self._workers[worker.number]
        if not worker.is_closing:
            self._selector.unregister(worker.sock)
        worker.sock.close()

    def _restart(self, server: ForkServerProcess) -> ForkServerProcess:
        """A new server. With the old one its workers died, but not what these had started."""
        self._starts_lost += 1
        if self._starts_lost >= MAX_STARTS_LOST:
            raise RunError(
                f"the reward pool's server died {self._starts_lost} times in a row: "
                f"{server.last_words()}"
            )
        for worker in list(self._workers.values()):
            if worker.pid is not None:
                try:
                    os.killpg(worker.pid, signal.SIGKILL)
                except OSError:
                    pass
            self._forget(worker)
        self._drop_server()
        return self.wait_ready()

    def _drop_server(self) -> None:
        if self._server is not None:
            self._selector.unregister(self._server.control)
            self._server.close()
            self._server = None

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers


class RewardPool(ScorePool):
    """A `ScorePool` of reward plugins.

    `timeout_s` is the time one sample may take in one reward; a reward that knows better says so
    with `time_limit_s`. `workers` 0 means one per core, at most eight.
    """

    def __init__(
        self,
        rewards: Sequence[Reward[Any]],
        *,
        workers: int = 0,
        timeout_s: float = 10.0,
        context: RewardContext | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.rewards = tuple(rewards)
        setup, limits = PoolSetup.of(rewards, context), limits_of(rewards, timeout_s)
        super().__init__(setup, limits, workers or default_workers(), check)
