"""Episodes that are played one by one: of a single turn, or of an environment of values."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from posttrain.core.contracts import PromptGroup
from posttrain.core.rollout.episodes import EpisodeRunner
from posttrain.core.rollout.plays import EpisodeLimits, Plays, awaited
from posttrain.core.rollout.prompts import PromptEncoder
from posttrain.core.rollout.submitting import Submitting
from posttrain.core.rollout.turns import completion_of
from posttrain.core.runtime.seeding import derive_seed
from posttrain.core.types import Completion, Problem, SamplingParams


class OneTurn(Plays):
    """A response is what the engine gives to the prompt."""

    def __init__(
        self, encoder: PromptEncoder, limits: EpisodeLimits, check: Callable[[], None]
    ) -> None:
        super().__init__("none", limits, check)
        self._encoder = encoder

    def encode_prompt(self, problem: Problem) -> tuple[int, ...]:
        """As of the tokenizer."""
        return self._encoder.encode_prompt(problem)

    async def _episode(
        self, submitting: Submitting, prompt: PromptGroup, params: SamplingParams, seed: int
    ) -> list[Completion]:
        request = replace(params, num_generations=1, seed=seed)
        return [await awaited(submitting.submit(prompt.prompt_ids, request))]


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
        runner = self.runner
        episode = runner.open(prompt)
        while episode.finish_reason is None:
            left = params.max_tokens - len(episode.token_ids)
            request = replace(
                params,
                num_generations=1,
                max_tokens=left,
                stop_strings=runner.environment.stop_strings(),
                seed=derive_seed(seed, "turn", len(episode.turns)),
            )
            ids = (*prompt.prompt_ids, *episode.token_ids)
            turn = await awaited(submitting.submit(ids, request))
            episode = runner.turns.after(episode, turn)
            if episode.finish_reason is not None:
                break
            steps = [(episode.state, runner.turns.said(turn, episode.tools))]
            (observation,) = await asyncio.to_thread(runner.answers.to, steps)
            room = left - len(turn.token_ids)
            episode = runner.turns.answered(episode, turn, observation, episode.tools, room)
        return [completion_of(episode)]
