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
from posttrain.core.rollout.plays import (
    EpisodeFailed,
    EpisodeLimits,
    Plays,
    awaited,
    described,
)
from posttrain.core.rollout.submitting import Submitting
from posttrain.core.rollout.turns import Turns, completion_of
from posttrain.core.runtime.seeding import derive_seed
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
        state, episode = opening.state, Episode(prompt, opening.state)
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
            while episode.finish_reason is None:
                left = room - len(episode.token_ids)
                number = len(episode.turns)
                request = replace(
                    params,
                    num_generations=1,
                    max_tokens=left,
                    seed=derive_seed(seed, "turn", number),
                )
                asked = submitting.submit((*ids, *episode.token_ids), request)
                turn = await awaited(asked)
                episode = self.turns.after(episode, turn)
                if episode.finish_reason is not None:
                    break
                said = self.turns.said(turn, tools)
                observation = await self._step(self.live.step(state, said), "step")
                state = observation.state
                episode = self.turns.answered(
                    episode, turn, observation, tools, left - len(turn.token_ids)
                )
            outcome = await self._scored(state)
            episode = episode if outcome is None else replace(episode, reward=outcome)
        except EpisodeFailed as error:
            if not episode.turns:
                raise
            episode = replace(episode, failed=str(error))
        finally:
            await self._closed(state)
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
