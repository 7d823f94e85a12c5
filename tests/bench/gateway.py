"""What the gateway itself costs: requests at once whose answers are there at once.

python -m tests.bench.gateway [EPISODES] [CALLS] [CHARACTERS]; one process, client included.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from posttrain.core.contracts import (
    ModelEndpoint,
    NoConfig,
    Outcome,
    PlayedEnvironment,
    PromptGroup,
)
from posttrain.core.gateway.runner import PlayedRunner
from posttrain.core.rollout.plays import EpisodeLimits
from posttrain.core.types import Completion, Problem, SamplingParams
from tests.helpers.gateway import END, chat_tokenizer


class AtOnce:
    """Gives each request the same answer."""

    engine: Any = type("Engine", (), {"policy_version": 0, "name": "script"})

    def __init__(self) -> None:
        self.ids = chat_tokenizer().encode_text(f"an answer of some words{END}", special=True)

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams) -> Future[Completion]:
        answer: Future[Completion] = Future()
        logprobs = (-1.0,) * len(self.ids)
        answer.set_result(Completion(self.ids, logprobs, "stop", 0, params.seed, "script", "0"))
        return answer


class Chat(PlayedEnvironment[NoConfig]):
    """Turns of a user, over one connection. Source: own."""

    name = "chat"
    Config = NoConfig

    def __init__(self, calls: int, characters: int) -> None:
        super().__init__(NoConfig())
        self.calls, self.characters = calls, characters

    async def play(self, problem: Problem, endpoint: ModelEndpoint, seed: int) -> Outcome:
        host, path = endpoint.base_url.removeprefix("http://").split("/", 1)
        reader, writer = await asyncio.open_connection(*host.split(":"))
        history: list[Any] = [{"role": "user", "content": "x" * self.characters}]
        for number in range(self.calls):
            body = json.dumps({"messages": history}).encode()
            head = f"POST /{path}/chat/completions HTTP/1.1\r\nhost: {host}\r\n"
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            lines = (await reader.readuntil(b"\r\n\r\n")).lower()
            size = int(lines.split(b"content-length:")[1].split(b"\r\n")[0])
            made = json.loads(await reader.readexactly(size))
            history.append(made["choices"][0]["message"])
            history.append({"role": "user", "content": f"go on {number}"})
        writer.close()
        return Outcome(reward=1.0)


def main(episodes: int = 1000, calls: int = 1, characters: int = 300) -> None:
    limits = EpisodeLimits(episodes, 600, 600, 0.0, 100_000)
    runner = PlayedRunner(Chat(calls, characters), chat_tokenizer(), limits, calls)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    submitting: Any = AtOnce()
    params, prompt = SamplingParams(max_tokens=100), PromptGroup(Problem("k", "p", "", ""), (1,))

    async def play() -> list[list[Completion]]:
        played = [runner._episode(submitting, prompt, params, n) for n in range(episodes)]
        return await asyncio.gather(*played)

    runner._start()
    began, busy = time.perf_counter(), time.process_time()
    rows = runner._run(play(), lambda: None)
    seconds, busy = time.perf_counter() - began, time.process_time() - busy
    runner.close()
    assert all(len(found) == 1 and not found[0].failed for found in rows), rows[0][0].failed
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    whole = len(rows[0][0].prompt_ids) + len(rows[0][0].token_ids)
    print(
        f"{episodes} episodes of {calls} calls, {whole} tokens each: {seconds:.1f} s, "
        f"{1e3 * busy / episodes / calls:.1f} ms of a core a call, {more:.0f} MB more"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
