"""Single requests to an engine, from many episodes at once, put together for it.

An engine takes a list of prompts, and episodes that do not wait for one another ask one by one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any

from posttrain.core.contracts import RolloutEngine
from posttrain.core.errors import RunError
from posttrain.core.runtime.seeding import derive_seed
from posttrain.core.types import Completion, SamplingParams

GATHER_S = 0.005
"""Requests that come within so long of one another are put together."""
GATHER_MOST_S = 0.05
"""How long a request may wait for others: little against the time of one."""
STRETCH_TOKENS = 256
"""Tokens of a response that are sampled with the same weights, where weights change on the way."""
LARGEST = 1024
"""Requests put together, at most; the engine cuts them up as it can."""


@dataclass(frozen=True, slots=True)
class _Request:
    """`so_far` are the stretches of the response that were sampled before."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    answer: Future[Completion]
    so_far: tuple[Completion, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for part in self.so_far for token in part.token_ids)

    @property
    def seed(self) -> int:
        number = len(self.so_far)
        return derive_seed(self.params.seed, "stretch", number) if number else self.params.seed


class Submitting:
    """Answers requests by the calls that an engine takes, from one thread, or from several if it
    says that it takes several calls at once.

    A request's seed is its own, so what else was asked at the time does not change its answer.
    With `stretch`, a response is sampled so many tokens at a time, each time with the weights that
    the engine has then; one with stop strings is sampled whole, as a string may lie across two
    stretches. `gate` is held around each call of the engine.
    """

    def __init__(
        self,
        engine: RolloutEngine[Any],
        stretch: int | None = None,
        gate: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.engine, self.stretch = engine, stretch
        self.busy_s = 0.0
        self._gate = gate
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
        while not self._queue.empty():
            waiting = self._queue.get_nowait()
            if waiting is not None:
                waiting.answer.cancel()

    def _work(self) -> None:
        while (first := self._queue.get()) is not None:
            self._room.acquire()  # what arrives while the engine works is one call
            gathered, ended = self._gathered(first)
            self._calls.submit(self._answer, gathered)
            if ended:
                break

    def _gathered(self, first: _Request) -> tuple[list[_Request], bool]:
        """`first` and those that follow closely, and whether the end came too."""
        requests, end = [first], time.monotonic() + GATHER_MOST_S
        while len(requests) < LARGEST:
            left = min(GATHER_S, end - time.monotonic())
            try:
                found = self._queue.get(timeout=max(0.0, left))
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
                if request.so_far or request.answer.set_running_or_notify_cancel():
                    kind = replace(request.params, max_tokens=1, seed=0)
                    kinds.setdefault(kind, []).append(request)
            with self._gate():
                began = time.perf_counter()
                for kind, alike in kinds.items():
                    self._answer_alike(kind, alike)
                self.busy_s += time.perf_counter() - began
        finally:
            self._room.release()

    def _limit(self, request: _Request) -> int:
        left = request.params.max_tokens - len(request.tokens)
        if self.stretch is None or request.params.stop_strings:
            return left
        return min(left, self.stretch)

    def _answer_alike(self, kind: SamplingParams, requests: Sequence[_Request]) -> None:
        """Requests that differ in prompt, seed and length alone."""
        limits = tuple(map(self._limit, requests))
        try:
            found = self.engine.generate(
                [(*request.prompt_ids, *request.tokens) for request in requests],
                replace(
                    kind,
                    max_tokens=max(limits),
                    max_tokens_each=limits,
                    seeds_each=tuple(request.seed for request in requests),
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
            grown = replace(request, so_far=(*request.so_far, completion))
            if completion.finish_reason == "length" and self._limit(grown) > 0:
                self._queue.put(grown)
            else:
                request.answer.set_result(joined(grown.so_far))


def joined(parts: Sequence[Completion]) -> Completion:
    """One response of its stretches."""
    first, last = parts[0], parts[-1]
    if len(parts) == 1:
        return first
    versions = [p.policy_version for p in parts for _ in p.token_ids]
    return replace(
        first,
        token_ids=tuple(token for p in parts for token in p.token_ids),
        logprobs=tuple(value for p in parts for value in p.logprobs),
        entropies=tuple(value for p in parts for value in p.entropies),
        finish_reason=last.finish_reason,
        versions=tuple(versions) if len(set(versions)) > 1 else (),
    )
