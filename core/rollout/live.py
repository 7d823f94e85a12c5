"""Episodes of environments with a life of their own, turn by turn."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from posttrain.core.contracts import LiveEnvironment, Opening, PromptGroup
from posttrain.core.contracts.rollout import Episode
from posttrain.core.rollout.event_loop import CLOSE_S, within
from posttrain.core.rollout.plays import EpisodeFailed, EpisodeLimits, Plays, described, next_turn
from posttrain.core.rollout.submitting import Submitting
from posttrain.core.rollout.turns import Turns, completion_of
from posttrain.core.types import Completion, Problem, SamplingParams

logger = logging.getLogger(__name__)
T = TypeVar("T")


class LiveRunner(Plays):
    """Plays a `LiveEnvironment`: a turn of the policy, the environment's answer, and so on."""

    def __init__(
        self,
        environment: LiveEnvironment[Any],
        turns: Turns,
        limits: EpisodeLimits,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(environment.name, limits, check)
        self.live, self.turns = environment, turns
        self.repeatable = environment.deterministic

    async def _begin(self) -> None:
        await self.live.start()

    async def _end(self) -> None:
        await self.live.stop()

    def encode_prompt(self, problem: Problem) -> tuple[int, ...]:
        """The prompt without what the environment shows when an episode begins."""
        self._start()
        return self.turns.prompt(problem, Opening(None, tools=self.live.schemas()))

    async def _episode(
        self, submitting: Submitting, prompt: PromptGroup, params: SamplingParams, seed: int
    ) -> list[Completion]:
        opening = await self._step(self.live.reset(prompt.problem, seed), "reset")
        episode = Episode(prompt, opening.state)
        try:
            opening = replace(opening, tools=(*self.live.schemas(), *opening.tools))
            ids = self.turns.prompt(prompt.problem, opening)
            room = min(params.max_tokens, self.limits.max_model_len - len(ids))
            if room < 1:
                raise EpisodeFailed(
                    f"its prompt of {len(ids)} tokens leaves no room in the model's "
                    f"{self.limits.max_model_len}: shorten what the environment shows first"
                )
            tools = (*prompt.problem.tools, *opening.tools)
            episode = replace(episode, prompt_ids=ids, tools=tools)
            params = replace(params, max_tokens=room)
            while episode.finish_reason is None:
                episode = await next_turn(submitting, self.turns, episode, params, seed)
                if episode.finish_reason is None:
                    said = self.turns.said(episode)
                    observation = await self._step(self.live.step(episode.state, said), "step")
                    episode = self.turns.answered(episode, observation, room)
            outcome = await self._scored(episode.state)
            episode = episode if outcome is None else replace(episode, reward=outcome)
        except EpisodeFailed as error:
            if not episode.turns:
                raise
            episode = replace(episode, failed=str(error))
        finally:
            await self._closed(episode.state)
        return [completion_of(episode)]

    async def _step(self, call: Coroutine[Any, Any, T], what: str) -> T:
        try:
            return await within(self.limits.step_s, call)
        except TimeoutError:
            raise EpisodeFailed(f"`{what}` took more than {self.limits.step_s:g} s") from None
        except Exception as error:  # a plugin and its servers may raise anything
            logger.debug("`%s` of an episode failed", what, exc_info=True)
            raise EpisodeFailed(described(error)) from error

    async def _scored(self, state: object) -> float | None:
        """The environment's score of the whole; the episode's time limits it."""
        try:
            return await self.live.score(state)
        except Exception as error:  # as above
            logger.debug("`score` of an episode failed", exc_info=True)
            raise EpisodeFailed(described(error)) from error

    async def _closed(self, state: object) -> None:
        """Close the episode's state, whatever ended it."""
        closing = asyncio.ensure_future(self._close(state))
        stopped: asyncio.CancelledError | None = None
        while not closing.done():
            try:
                await asyncio.shield(closing)
            except asyncio.CancelledError as error:  # twice, where a run is stopped and then closed
                stopped = error
        if stopped is not None:
            raise stopped

    async def _close(self, state: object) -> None:
        try:
            await within(CLOSE_S, self.live.close(state))
        except Exception as error:  # the episode is over, and has what it has
            logger.warning(
                "environment '%s': an episode was not closed: %s",
                self.live.name,
                described(error),
            )
