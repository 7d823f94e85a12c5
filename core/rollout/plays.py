"""Episodes that do not wait for one another: each is a coroutine, and many run at once.

`Plays` has what all kinds share: a loop in a thread of its own, limits, and what becomes of an
episode that fails. Its plainest kinds are here; those of live environments are in `live.py`.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from posttrain.core.contracts import PromptGroup, RolloutEngine, SampledGroup
from posttrain.core.contracts.rollout import Episode
from posttrain.core.errors import PosttrainError, RunError
from posttrain.core.rollout.episodes import EpisodeRunner
from posttrain.core.rollout.event_loop import CLOSE_S, Blocked, EventLoop, within
from posttrain.core.rollout.prompts import PromptEncoder
from posttrain.core.rollout.submitting import Submitting
from posttrain.core.rollout.turns import Turns, completion_of, first_branches, so_far
from posttrain.core.runtime.machine import allow_open_files
from posttrain.core.runtime.seeding import derive_seed
from posttrain.core.types import Completion, Problem, SamplingParams

logger = logging.getLogger(__name__)
T = TypeVar("T")
START_S = 300.0
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
        self._loop: EventLoop | None = None

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
        room, seen = asyncio.Semaphore(self.limits.at_once), Counter[str]()
        async with asyncio.TaskGroup() as tasks:
            work = []
            for prompt in prompts:
                key = prompt.problem.key
                # A problem that comes again has other episodes; its first ones are as without it.
                again = derive_seed(params.seed, "again", seen[key])
                own = replace(params, seed=again) if seen[key] else params
                seen[key] += 1
                work.append(tasks.create_task(self.group(submitting, prompt, own, room)))
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
            return await within(limit, self._episode(submitting, prompt, params, seed))
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

    def _start(self) -> EventLoop:
        """The loop; it runs, and the environment starts, unless that is done."""
        if self._loop is None:
            allow_open_files(OPEN_FILES)
            self._loop = EventLoop(self.limits.step_s + SLACK_S)
            try:
                self._run(self._started(), self._check)
            except BaseException:
                self.close()
                raise
        return self._loop

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """That of its episodes, which has started."""
        return self._start().asyncio

    async def _started(self) -> None:
        name = self.name
        try:
            await within(START_S, self._begin())
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

    def _run(self, work: Coroutine[Any, Any, T], check: Callable[[], Any]) -> T:
        """The result of `work` in the loop."""
        assert self._loop is not None
        try:
            return self._loop.run(work, check)
        except ExceptionGroup as group:
            raise first_of(group) from group
        except Blocked as error:
            raise RunError(
                f"environment '{self.name}' has kept all of its episodes waiting for "
                f"{error.silent_s:.0f} s{error.place}: what blocks belongs into "
                "`await asyncio.to_thread(...)`"
            ) from error

    def close(self) -> None:
        """End what the environment started; may be called twice."""
        loop, self._loop = self._loop, None
        if loop is None or loop.blocked:
            return
        try:
            loop.run(within(CLOSE_S, self._end()))
        except Exception as error:  # whatever it is, the stage is over
            logger.warning("environment '%s' did not stop: %s", self.name, described(error))
        loop.close()


class OneTurn(Plays):
    """A response is what the engine gives to the prompt."""

    def __init__(
        self, encoder: PromptEncoder, limits: EpisodeLimits, check: Callable[[], None]
    ) -> None:
        super().__init__("none", limits, check)
        self._encoder = encoder

    def encode_prompt(self, problem: Problem) -> tuple[int, ...]:
        return self._encoder.encode_prompt(problem)

    async def _episode(
        self, submitting: Submitting, prompt: PromptGroup, params: SamplingParams, seed: int
    ) -> list[Completion]:
        request = replace(params, num_generations=1, seed=seed)
        return [await asyncio.wrap_future(submitting.submit(prompt.prompt_ids, request))]


class ValueEpisodes(Plays):
    """Episodes of an `Environment`, whose states are values."""

    def __init__(
        self, runner: EpisodeRunner, limits: EpisodeLimits, check: Callable[[], None]
    ) -> None:
        super().__init__(runner.environment.name, limits, check)
        self.runner = runner

    def encode_prompt(self, problem: Problem) -> tuple[int, ...]:
        """With the environment's instructions."""
        return self.runner.encode_prompt(problem)

    async def _episode(
        self, submitting: Submitting, prompt: PromptGroup, params: SamplingParams, seed: int
    ) -> list[Completion]:
        turns, episode = self.runner.turns, self.runner.open(prompt)
        params = replace(params, stop_strings=self.runner.environment.stop_strings())
        while episode.finish_reason is None:
            episode = await next_turn(submitting, turns, episode, params, seed)
            if episode.finish_reason is None:
                steps = [(episode.state, turns.said(episode))]
                (observation,) = await asyncio.to_thread(self.runner.answers.to, steps)
                episode = turns.answered(episode, observation, params.max_tokens)
        return [completion_of(episode)]


async def next_turn(
    submitting: Submitting, turns: Turns, episode: Episode, params: SamplingParams, seed: int
) -> Episode:
    """The episode with one more turn of the policy, which the environment has not answered.

    `params.max_tokens` is the limit of the whole response; `seed` is that of the episode.
    """
    request = replace(
        params,
        num_generations=1,
        max_tokens=params.max_tokens - len(episode.token_ids),
        seed=derive_seed(seed, "turn", len(episode.turns)),
    )
    asked = submitting.submit(so_far(episode), request)
    return turns.after(episode, await asyncio.wrap_future(asked))


def described(error: BaseException) -> str:
    """An error in one line, with its kind."""
    line = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def first_of(error: BaseException) -> BaseException:
    """The error, or of a group the first one that is not a group itself."""
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
