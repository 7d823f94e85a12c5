"""Episodes that do not wait for one another: each is a coroutine, and many run at once.

`Plays` has what all kinds share: a loop in a thread of its own, limits, and what becomes of an
episode that fails.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from posttrain.core.contracts import PromptGroup, RolloutEngine, SampledGroup
from posttrain.core.errors import PosttrainError, RunError
from posttrain.core.rollout.submitting import Submitting
from posttrain.core.rollout.turns import first_branches
from posttrain.core.runtime.machine import allow_open_files
from posttrain.core.runtime.seeding import derive_seed
from posttrain.core.runtime.waiting import result_of
from posttrain.core.types import Completion, Problem, SamplingParams

logger = logging.getLogger(__name__)
T = TypeVar("T")
BEAT_S = 0.5
START_S = 300.0
CLOSE_S = 10.0
SLACK_S = 10.0
OPEN_FILES = 65_536


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of episodes that are played at once; `most_failed` is a share of those of a call."""

    at_once: int
    episode_s: float
    step_s: float
    most_failed: float
    max_model_len: int


class EpisodeFailed(Exception):
    """Why an episode is not to be learned from, in words."""


class Plays(ABC):
    """Plays the episodes of an environment, at most `limits.at_once` at the same time.

    An episode that raises, or takes longer than its limits, has failed: it keeps its place in its
    group, without a score. `check` is called while episodes are waited for, and raises to stop.
    """

    def __init__(self, name: str, limits: EpisodeLimits, check: Callable[[], None]) -> None:
        self.name, self.limits = name, limits
        self._check = check
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._beat = time.monotonic()

    repeatable: bool = True
    """Whether the same episodes can be played again."""

    async def _begin(self) -> None:  # noqa: B027 - most share nothing
        """Start what all episodes share."""

    async def _end(self) -> None:  # noqa: B027 - most share nothing
        """Free what `_begin` made."""

    @abstractmethod
    async def _episode(
        self, submitting: Submitting, prompt: PromptGroup, params: SamplingParams, seed: int
    ) -> list[Completion]:
        """The branches of one episode, the one with its last turn first; mostly one."""

    @abstractmethod
    def encode_prompt(self, problem: Problem) -> tuple[int, ...]:
        """Token ids of the prompt, as far as they are known before the episode begins."""

    def generate(
        self,
        engine: RolloutEngine[Any],
        prompts: Sequence[PromptGroup],
        params: SamplingParams,
        check: Callable[[], None] = lambda: None,
    ) -> list[SampledGroup]:
        """`params.num_generations` whole episodes for each prompt, in order.

        Raises `RunError` when more of them failed than the limits allow.
        """
        self._start()
        submitting = Submitting(engine)

        def both() -> None:
            self._check()
            check()

        try:
            return self._run(self._all(submitting, prompts, params), both)
        finally:
            submitting.close()

    async def _all(
        self, submitting: Submitting, prompts: Sequence[PromptGroup], params: SamplingParams
    ) -> list[SampledGroup]:
        room = asyncio.Semaphore(self.limits.at_once)
        async with asyncio.TaskGroup() as tasks:
            work = [tasks.create_task(self.group(submitting, p, params, room)) for p in prompts]
        groups = [task.result() for task in work]
        self.refuse_failures(groups)
        return groups

    async def group(
        self,
        submitting: Submitting,
        prompt: PromptGroup,
        params: SamplingParams,
        room: asyncio.Semaphore,
    ) -> SampledGroup:
        """`params.num_generations` episodes of one prompt; `room` is taken by each."""

        async def played(number: int) -> list[Completion]:
            seed = derive_seed(params.seed, "episode", prompt.problem.key, number)
            async with room:
                return await self._limited(submitting, prompt, params, seed)

        async with asyncio.TaskGroup() as tasks:
            work = [tasks.create_task(played(n)) for n in range(params.num_generations)]
        return SampledGroup(prompt, branches_of([task.result() for task in work]))

    async def _limited(
        self, submitting: Submitting, prompt: PromptGroup, params: SamplingParams, seed: int
    ) -> list[Completion]:
        """The episode, or an empty one that says why there is none."""
        limit = self.limits.episode_s
        try:
            async with asyncio.timeout(limit):
                return await self._episode(submitting, prompt, params, seed)
        except TimeoutError:
            reason = f"the episode took more than {limit:g} s"
        except EpisodeFailed as error:
            reason = str(error)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            reason = "a library cancelled the episode, as some do when a connection is lost"
        return [empty_completion(submitting.engine, seed, reason)]

    def refuse_failures(self, groups: Sequence[SampledGroup]) -> None:
        """Raise `RunError` when more episodes failed than the limits allow."""
        episodes = [c for group in groups for c in first_branches(group.completions)]
        failed = [e.failed for e in episodes if e.failed]
        most = self.limits.most_failed
        if len(failed) > most * len(episodes):
            raise RunError(
                f"environment '{self.name}': {len(failed)} of {len(episodes)} episodes "
                f"failed, more than max_failure_rate {most:g} allows; the first: {failed[0]}: "
                "fix the environment or its server, or raise environment.max_failure_rate"
            )
        if failed:
            logger.warning(
                "environment '%s': %d of %d episodes failed; the first: %s",
                self.name,
                len(failed),
                len(episodes),
                failed[0],
            )

    # -- the loop ---------------------------------------------------------------------------

    def _start(self) -> None:
        """Run the loop, and let the environment start, unless that is done."""
        if self._loop is not None:
            return
        allow_open_files(OPEN_FILES)
        self._loop, self._beat = asyncio.new_event_loop(), time.monotonic()
        self._thread = threading.Thread(target=self._loop.run_forever, name="episodes", daemon=True)
        self._thread.start()
        self._loop.call_soon_threadsafe(self._beats)
        try:
            self._run(self._started(), self._check)
        except BaseException:
            self.close()
            raise

    async def _started(self) -> None:
        name = self.name
        try:
            async with asyncio.timeout(START_S):
                await self._begin()
        except TimeoutError:
            raise RunError(
                f"environment '{name}' did not start within {START_S:g} s: see what it waits for"
            ) from None
        except PosttrainError:
            raise
        except Exception as error:  # a plugin and its servers may raise anything
            raise RunError(
                f"environment '{name}' could not start: {described(error)}: correct its fields, "
                "or start what it connects to"
            ) from error

    def _beats(self) -> None:
        self._beat = time.monotonic()
        if self._loop is not None and self._loop.is_running():
            self._loop.call_later(BEAT_S, self._beats)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop of its episodes, which has started."""
        self._start()
        assert self._loop is not None
        return self._loop

    def _run(self, work: Coroutine[Any, Any, T], check: Callable[[], Any]) -> T:
        """The result of `work` in the loop."""
        assert self._loop is not None

        def both() -> None:
            check()
            self._refuse_blocking()

        try:
            return result_of(asyncio.run_coroutine_threadsafe(work, self._loop), both)
        except ExceptionGroup as group:
            raise first_of(group) from group

    def _refuse_blocking(self) -> None:
        """Raise `RunError` if one episode keeps all others waiting."""
        silent = time.monotonic() - self._beat
        if silent < self.limits.step_s + SLACK_S:
            return
        assert self._thread is not None and self._thread.ident is not None
        frame = sys._current_frames().get(self._thread.ident)
        where = traceback.extract_stack(frame)[-1] if frame else None
        place = f" (at {where.filename}:{where.lineno}, in {where.name})" if where else ""
        raise RunError(
            f"environment '{self.name}' has kept all of its episodes waiting for "
            f"{silent:.0f} s{place}: what blocks belongs into `await asyncio.to_thread(...)`"
        )

    def close(self) -> None:
        """End what the environment started; may be called twice."""
        loop, self._loop = self._loop, None
        if loop is None or self._thread is None:
            return
        stopped = asyncio.run_coroutine_threadsafe(self._stopped(), loop)
        try:
            stopped.result(2 * CLOSE_S)
        except Exception as error:  # whatever it is, the stage is over
            logger.warning("environment '%s' did not stop: %s", self.name, described(error))
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join(CLOSE_S)
        if not loop.is_running():
            loop.close()

    async def _stopped(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        async with asyncio.timeout(CLOSE_S):
            await self._end()


async def awaited(asked: Future[Completion]) -> Completion:
    """The engine's answer."""
    return await asyncio.wrap_future(asked)


def described(error: BaseException) -> str:
    """An error in one line, with its kind."""
    line = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group that is not a group itself."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def empty_completion(engine: RolloutEngine[Any], seed: int, failed: str) -> Completion:
    """The response of an episode without a turn."""
    return Completion(
        token_ids=(),
        logprobs=(),
        finish_reason="length",
        policy_version=engine.policy_version,
        seed=seed,
        engine=engine.name,
        engine_version="",
        failed=failed,
    )


def branches_of(episodes: Sequence[Sequence[Completion]]) -> tuple[Completion, ...]:
    """The responses of a group's episodes, numbered where one has several branches."""
    if all(len(branches) == 1 for branches in episodes):
        return tuple(branches[0] for branches in episodes)
    return tuple(
        replace(branch, episode=number)
        for number, branches in enumerate(episodes)
        for branch in branches
    )
