"""A program that knows the policy as an API alone: it asks for digits, by the client of OpenAI."""

from __future__ import annotations

import random

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from posttrain.core.contracts import ModelEndpoint, NoConfig, Outcome, PlayedEnvironment
from posttrain.core.types import Problem


class Player(PlayedEnvironment[NoConfig]):
    """Three questions; reward = answers that begin with the digit / 3. Source: own."""

    name = "player"
    Config = NoConfig

    async def start(self) -> None:
        self.client = AsyncOpenAI(base_url="http://127.0.0.1:1", api_key="none")

    async def stop(self) -> None:
        await self.client.close()

    def draws(self, problem: Problem) -> random.Random:
        """What the digits follow from."""
        return random.Random(problem.key)

    async def play(self, problem: Problem, endpoint: ModelEndpoint, seed: int) -> Outcome:
        client = self.client.with_options(base_url=endpoint.base_url, api_key=endpoint.key)
        rng, right = self.draws(problem), 0
        messages: list[ChatCompletionMessageParam] = []
        for _ in range(3):
            digit = str(rng.randrange(4))
            messages.append({"role": "user", "content": digit})
            done = await client.chat.completions.create(
                model=endpoint.model, messages=messages, max_tokens=4
            )
            said = done.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": said})
            right += said[:1] == digit
        return Outcome(reward=right / 3)


class Whimsical(Player):
    """Other digits each time, a helper that asks one question, and one play in eight breaks."""

    name = "whimsical"

    def draws(self, problem: Problem) -> random.Random:
        return random.SystemRandom()

    async def play(self, problem: Problem, endpoint: ModelEndpoint, seed: int) -> Outcome:
        outcome = await super().play(problem, endpoint, seed)
        if random.SystemRandom().random() < 0.125:
            raise RuntimeError("the program broke")
        client = self.client.with_options(base_url=endpoint.base_url, api_key=endpoint.key)
        await client.chat.completions.create(
            model=endpoint.model, messages=[{"role": "user", "content": "0"}], max_tokens=4
        )
        return outcome
