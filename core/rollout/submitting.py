"""Single requests to an engine, from many episodes at once, put together for it.

An engine takes a list of prompts, and episodes that do not wait for one another ask one by one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any

from posttrain.core.contracts import RolloutEngine
from posttrain.core.errors import RunError
from posttrain.core.types import Completion, SamplingParams

GATHER_S = 0.005
"""How long a request may wait for others: little against the time of one."""
LARGEST = 1024
"""Requests put together, at most; the engine cuts them up as it can."""


@dataclass(frozen=True, slots=True)
class _Request:
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    answer: Future[Completion]


class Submitting:
    """Answers requests by the calls that an engine takes, from one thread, or from several if it
    says that it takes several calls at once.

    A request's seed is its own, so what else was asked at the time does not change its answer.
    """

    def __init__(self, engine: RolloutEngine[Any]) -> None:
        self.engine = engine
        self._queue: SimpleQueue[_Request | None] = SimpleQueue()
        self._calls = ThreadPoolExecutor(engine.calls_at_once, "sampling")
        self._room = threading.Semaphore(engine.calls_at_once)
        self._thread = threading.Thread(target=self._work, name="requests", daemon=True)
        self._thread.start()

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams) -> Future[Completion]:
        """The one completion of `prompt_ids`; what the engine raises is raised by the future."""
        answer: Future[Completion] = Future()
        self._queue.put(_Request(tuple(prompt_ids), params, answer))
        return answer

    def close(self) -> None:
        """Answer nothing more; requests that wait are cancelled."""
        self._queue.put(None)
        self._thread.join()
        self._calls.shutdown(cancel_futures=True)

    def _work(self) -> None:
        while (first := self._queue.get()) is not None:
            self._room.acquire()  # what arrives while the engine works is one call
            gathered, ended = self._gathered(first)
            self._calls.submit(self._answer, gathered)
            if ended:
                break
        while True:
            try:
                waiting = self._queue.get_nowait()
            except Empty:
                return
            if waiting is not None:
                waiting.answer.cancel()

    def _gathered(self, first: _Request) -> tuple[list[_Request], bool]:
        """`first` and what comes within `GATHER_S`, and whether the end came too."""
        requests, end = [first], time.monotonic() + GATHER_S
        while len(requests) < LARGEST:
            try:
                found = self._queue.get(timeout=max(0.0, end - time.monotonic()))
            except Empty:
                break
            if found is None:
                return requests, True
            requests.append(found)
        return requests, False

    def _answer(self, requests: Sequence[_Request]) -> None:
        try:
            kinds: dict[SamplingParams, list[_Request]] = {}
            for request in requests:
                if request.answer.set_running_or_notify_cancel():
                    kind = replace(request.params, max_tokens=1, seed=0)
                    kinds.setdefault(kind, []).append(request)
            for kind, alike in kinds.items():
                self._answer_alike(kind, alike)
        finally:
            self._room.release()

    def _answer_alike(self, kind: SamplingParams, requests: Sequence[_Request]) -> None:
        """Requests that differ in prompt, seed and length alone."""
        limits = tuple(request.params.max_tokens for request in requests)
        try:
            found = self.engine.generate(
                [request.prompt_ids for request in requests],
                replace(
                    kind,
                    max_tokens=max(limits),
                    max_tokens_each=limits,
                    seeds_each=tuple(request.params.seed for request in requests),
                ),
            )
            if [len(group) for group in found] != [1] * len(requests):
                raise RunError(
                    f"engine '{self.engine.name}' returned {len(found)} groups for "
                    f"{len(requests)} prompts: this is a fault of the engine, choose another one"
                )
        except BaseException as error:
            for request in requests:
                request.answer.set_exception(error)
            return
        for request, (completion,) in zip(requests, found, strict=True):
            request.answer.set_result(completion)
