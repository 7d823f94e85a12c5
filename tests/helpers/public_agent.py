"""A public agent package, `openai-agents`, that plays a game in a Python of its own.

This file is both sides: the environment, and the program that its Python runs, which knows the
policy as a `base_url` alone and imports nothing of ours.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

PACKAGE = "openai-agents==0.24.0"
TURNS = 3


async def serve() -> None:
    """A line `{id, base_url, key, model, digits}` gives `{id, reward}` or `{id, error}`."""
    from agents import Agent, OpenAIChatCompletionsModel, Runner
    from openai import AsyncOpenAI

    async def answer(asked: dict[str, Any]) -> None:
        try:
            found: dict[str, Any] = {"reward": await play(asked)}
        except Exception as error:  # whatever the package raises
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"id": asked["id"], **found}), flush=True)

    async def play(asked: dict[str, Any]) -> float:
        client = AsyncOpenAI(base_url=asked["base_url"], api_key=asked["key"])
        agent = Agent(name="player", model=OpenAIChatCompletionsModel(asked["model"], client))
        history: list[Any] = []
        right = 0
        for digit in asked["digits"]:
            found = await Runner.run(agent, [*history, {"role": "user", "content": digit}])
            history = found.to_input_list()
            right += str(found.final_output)[:1] == digit
        await client.close()
        return right / TURNS

    lines = asyncio.StreamReader(limit=2**20)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    running = set()
    while line := await lines.readline():
        running.add(asyncio.create_task(answer(json.loads(line))))


if __name__ == "__main__":
    asyncio.run(serve())
    sys.exit()

import random  # noqa: E402 - below is the environment's side

from posttrain.core.contracts import (  # noqa: E402
    ModelEndpoint,
    Outcome,
    PlayedEnvironment,
    PluginConfig,
)

if TYPE_CHECKING:
    from posttrain.core.types import Problem


class PublicAgentConfig(PluginConfig):
    """The Python that has the package."""

    python: str


class PublicAgent(PlayedEnvironment[PublicAgentConfig]):
    """Three digits are asked for; reward = answers that begin with the digit / 3. Source: own."""

    name = "public_agent"
    Config = PublicAgentConfig

    async def start(self) -> None:
        self.answers: dict[str, asyncio.Future[float]] = {}
        pipe = asyncio.subprocess.PIPE
        self.process = await asyncio.create_subprocess_exec(
            self.config.python, __file__, stdin=pipe, stdout=pipe
        )
        self.reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            found = json.loads(line)
            waiting = self.answers.pop(found["id"])
            if "error" in found:
                waiting.set_exception(RuntimeError(found["error"]))
            else:
                waiting.set_result(found["reward"])
        for left in self.answers.values():
            left.set_exception(RuntimeError("the agents' process has ended"))

    async def stop(self) -> None:
        self.process.kill()
        await self.process.wait()
        self.reader.cancel()

    async def play(self, problem: Problem, endpoint: ModelEndpoint, seed: int) -> Outcome:
        rng = random.Random(problem.key)
        digits = [str(rng.randrange(4)) for _ in range(TURNS)]
        answer: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self.answers[endpoint.key] = answer
        asked = {
            "id": endpoint.key,
            "base_url": endpoint.base_url,
            "key": endpoint.key,
            "model": endpoint.model,
            "digits": digits,
        }
        assert self.process.stdin is not None
        self.process.stdin.write((json.dumps(asked) + "\n").encode())
        return Outcome(reward=await answer)
