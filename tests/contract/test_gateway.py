"""Programs at the gateway: the real client of OpenAI, a real model, and what is recorded."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from posttrain.core.contracts import (
    EngineSetup,
    ModelEndpoint,
    NoConfig,
    Outcome,
    PlayedEnvironment,
    PromptGroup,
)
from posttrain.core.data.tokens import ChatTokenizer, rollout_batch
from posttrain.core.errors import ConfigError
from posttrain.core.gateway.runner import PlayedRunner
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.rollout.plays import EpisodeLimits
from posttrain.core.runtime.processes import process_start
from posttrain.core.types import Completion, Problem, SamplingParams
from posttrain.plugins.engines.transformers import TransformersEngine, TransformersEngineConfig
from posttrain.plugins.environments.agent import AgentConfig, AgentEnvironment
from tests.helpers.templates import family_tokenizer

Play = Callable[[ModelEndpoint], Awaitable[float | None]]
MAX_LEN = 500
PARAMS = SamplingParams(num_generations=1, max_tokens=12, seed=3)
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


class Recorded(TransformersEngine):
    """The engine, which keeps what it gave."""

    def __init__(self) -> None:
        super().__init__(TransformersEngineConfig())
        self.given: list[tuple[tuple[int, ...], Completion]] = []
        self.delay = 0.0

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[list[Completion]]:
        time.sleep(self.delay)
        found = super().generate(prompts, params)
        for prompt, group in zip(prompts, found, strict=True):
            self.given += [(tuple(prompt), completion) for completion in group]
        return found


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, seed=5, init_std=0.1, tokenizer=family_tokenizer("qwen3"))
    chat = ChatTokenizer.load(folder)
    engine = Recorded()
    engine.start(
        EngineSetup(
            model_dir=folder,
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_model_len=MAX_LEN,
            max_batch_size=64,
            stop_token_ids=chat.end_token_ids,
            pad_token_id=chat.pad_token_id,
            seed=0,
        )
    )
    yield engine
    engine.close()


@pytest.fixture
def engine(started: Recorded) -> Recorded:
    started.given.clear()
    started.delay = 0.0
    return started


class Played(PlayedEnvironment[NoConfig]):
    """Episodes that a coroutine of a test plays. Source: own."""

    name = "played"
    Config = NoConfig

    def __init__(self, play: Play) -> None:
        super().__init__(NoConfig())
        self._play = play

    async def play(self, problem: Problem, endpoint: ModelEndpoint, seed: int) -> Outcome:
        return Outcome(reward=await self._play(endpoint))


def rows_of(
    engine: Recorded,
    environment: PlayedEnvironment[Any],
    episodes: int = 1,
    max_calls: int = 64,
    episode_s: float = 60,
) -> list[Completion]:
    """The rows of `episodes` episodes of one problem."""
    assert engine._setup is not None
    tokenizer = ChatTokenizer.load(engine._setup.model_dir)
    limits = EpisodeLimits(64, episode_s, 60, 1.0, MAX_LEN)
    runner = PlayedRunner(environment, tokenizer, limits, max_calls)
    try:
        problem = Problem("one", "1 + 1?", "2", "")
        prompt = PromptGroup(problem, runner.encode_prompt(problem))
        params = SamplingParams(num_generations=episodes, max_tokens=12, seed=3)
        (group,) = runner.generate(engine, [prompt], params)
    finally:
        runner.close()
    rollout_batch([group], tokenizer)  # what is recorded is a batch
    return list(group.completions)


def assert_recorded(engine: Recorded, rows: Sequence[Completion]) -> None:
    """Rows hold the engine's tokens and log-probs, which are those of a plain forward pass."""
    drawn = {}
    for prompt, completion in engine.given:
        for i, value in enumerate(completion.logprobs):
            drawn.setdefault((*prompt, *completion.token_ids[: i + 1]), value)
    learned = {}
    for row in rows:
        whole = (*row.prompt_ids, *row.token_ids)
        plain = engine.score([whole])[0]
        first = len(row.prompt_ids)
        for i, value in enumerate(row.logprobs):
            if not row.sampled or row.sampled[i]:
                assert plain[first + i - 1] == pytest.approx(value, abs=1e-5)
                if not (row.elsewhere and row.elsewhere[i]):
                    assert whole[: first + i + 1] not in learned
                    learned[whole[: first + i + 1]] = value
    assert learned == drawn


def client_of(endpoint: ModelEndpoint, **fields: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.key, **fields)


def test_turns_streams_tools_and_siblings_by_the_real_client(engine: Recorded) -> None:
    async def play(endpoint: ModelEndpoint) -> float:
        async with client_of(endpoint) as client:
            chat: Any = client.chat.completions
            history: list[Any] = [{"role": "user", "content": "1 + 1?"}]
            for number in range(3):
                made = await chat.create(
                    model="any", messages=history, tools=[TOOL], logprobs=True, temperature=1
                )
                message = made.choices[0].message
                prompt, drawn = engine.given[-1]
                assert made.usage.prompt_tokens == len(prompt)
                assert made.usage.completion_tokens == len(drawn.token_ids)
                assert [c.logprob for c in made.choices[0].logprobs.content] == list(drawn.logprobs)
                history += [message.model_dump(exclude_none=True)]
                history += [{"role": "user", "content": f"and {number}?"}]
            pieces = [
                piece
                async for piece in await chat.create(
                    model="any",
                    messages=history,
                    tools=[TOOL],
                    stream=True,
                    stream_options={"include_usage": True},
                )
            ]
            text = "".join(p.choices[0].delta.content or "" for p in pieces if p.choices)
            assert pieces[-1].usage.completion_tokens == len(engine.given[-1][1].token_ids)
            history += [{"role": "assistant", "content": text}, {"role": "user", "content": "so?"}]
            both = await chat.create(model="any", messages=history, tools=[TOOL], n=2)
            assert len(both.choices) == 2
            assert [m.id async for m in client.models.list()] == [endpoint.model]
            plain = await client.completions.create(model="any", prompt="1 + 1 =", max_tokens=3)
            assert plain.usage is not None and plain.usage.completion_tokens <= 3
            async with httpx.AsyncClient() as other:
                url = f"{endpoint.base_url}/reward"
                assert (await other.post(url, json={"value": 2.0, "call": 0})).json() == {
                    "ok": True
                }
        return 1.5

    rows = rows_of(engine, Played(play))
    assert len(rows) == 3  # the text completion, and two answers to the last question
    assert_recorded(engine, rows)
    assert {row.reward for row in rows} == {1.5} and not any(row.failed for row in rows)
    assert rows[0].counts["metric/continued"] == 4 and not rows[0].counts["altered"]
    assert [len(row.turn_ends) for row in rows] == [1, 5, 5]
    assert rows[1].turn_rewards[0] == 2.0


def test_the_responses_api_by_the_real_client(engine: Recorded) -> None:
    async def play(endpoint: ModelEndpoint) -> float:
        tool: Any = {"type": "function", "strict": True, **TOOL["function"]}
        async with client_of(endpoint) as client:
            history: list[Any] = [{"role": "user", "content": "1 + 1?"}]
            for number in range(2):
                made = await client.responses.create(
                    model="any", instructions="Be brief.", input=history, tools=[tool]
                )
                assert made.usage is not None
                assert made.usage.output_tokens == len(engine.given[-1][1].token_ids)
                history += [item.model_dump(exclude_none=True) for item in made.output]
                history += [{"role": "user", "content": f"and {number}?"}]
            with pytest.raises(openai.BadRequestError, match="previous_response_id: send"):
                await client.responses.create(input="x", previous_response_id="call-0")
        return 1.0

    (row,) = rows_of(engine, Played(play))
    assert_recorded(engine, [row])
    assert (row.counts["metric/continued"], len(row.turn_ends)) == (1, 2)


def test_episodes_at_once_keep_apart_and_equal_seeds_give_equal_episodes(engine: Recorded) -> None:
    async def play(endpoint: ModelEndpoint) -> float:
        async with client_of(endpoint) as client:
            chat: Any = client.chat.completions
            texts = ["a", "b", "c"]

            async def ask(text: str) -> None:
                await chat.create(model="m", messages=[{"role": "user", "content": text}])

            await asyncio.gather(*map(ask, texts))
        return 1.0

    def tokens(rows: Sequence[Completion]) -> list[set[tuple[int, ...]]]:
        episodes = sorted({row.episode for row in rows})
        return [{r.token_ids for r in rows if r.episode == number} for number in episodes]

    first = rows_of(engine, Played(play), episodes=4)
    assert_recorded(engine, first)
    assert len(tokens(first)) == 4 and tokens(first)[0] != tokens(first)[1]
    engine.given.clear()
    assert tokens(rows_of(engine, Played(play), episodes=4)) == tokens(first)


def test_keys_bodies_and_routes_that_are_wrong_get_errors_of_the_api(engine: Recorded) -> None:
    seen: list[ModelEndpoint] = []
    both = asyncio.Event()

    async def play(endpoint: ModelEndpoint) -> float:
        seen.append(endpoint)
        if len(seen) == 2:
            both.set()
        await both.wait()
        other = next(each for each in seen if each != endpoint)
        async with httpx.AsyncClient() as client:

            async def status(
                url: str, key: str, body: Any, retry: bytes = b"0"
            ) -> tuple[int, str, str]:
                made = await client.post(
                    url,
                    content=body if isinstance(body, bytes) else json.dumps(body),
                    headers={b"authorization": f"Bearer {key}", b"x-stainless-retry-count": retry},
                )
                again = made.headers["x-should-retry"]
                return made.status_code, made.json()["error"]["code"], again

            chat = f"{endpoint.base_url}/chat/completions"
            good = {"messages": [{"role": "user", "content": "x"}]}
            assert await status(chat, other.key, good) == (401, "other_key", "false")
            wrong = chat.replace(endpoint.key, "0" * 32)
            assert await status(wrong, "0" * 32, good) == (401, "unknown_key", "false")
            for body in (b"{", b"[]", b"\xff", b'{"messages": "\\ud800"}', b"[" * 100_000):
                assert await status(chat, endpoint.key, body) == (400, "invalid_json", "false")
            long = b'{"x": "' + b"a" * (17 * 2**20) + b'"}'
            assert (await status(chat, endpoint.key, long))[:2] == (413, "body_too_large")
            over = {"messages": [{"role": "user", "content": "x" * MAX_LEN}]}
            code = "context_length_exceeded"
            assert await status(chat, endpoint.key, over) == (400, code, "false")
            # A digit, but not a number.
            assert await status(chat, endpoint.key, over, b"\xb2") == (400, code, "false")
            text = {"prompt": [1, 10**6]}
            plain = f"{endpoint.base_url}/completions"
            assert (await status(plain, endpoint.key, text))[:2] == (400, "invalid_prompt")
            nowhere = f"{endpoint.base_url}/embeddings"
            assert (await status(nowhere, endpoint.key, {}))[:2] == (404, "unknown_route")
            reward = f"{endpoint.base_url}/reward"
            nan = b'{"value": NaN}'
            assert (await status(reward, endpoint.key, nan))[:2] == (400, "invalid_reward")
            huge = b'{"value": 1' + b"0" * 400 + b"}"
            assert (await status(reward, endpoint.key, huge))[:2] == (400, "invalid_reward")
            tools = {"input": "x", "tools": 5}
            responses = f"{endpoint.base_url}/responses"
            assert (await status(responses, endpoint.key, tools))[:2] == (400, "invalid_tools")
        return 1.0

    rows = rows_of(engine, Played(play), episodes=2)
    assert not engine.given
    assert [row.failed for row in rows] == ["the program never asked the policy"] * 2


def test_a_client_that_leaves_in_a_stream_ends_nothing_else(engine: Recorded) -> None:
    async def play(endpoint: ModelEndpoint) -> float:
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        async with httpx.AsyncClient() as client:
            engine.delay = 1.5
            url = f"{endpoint.base_url}/chat/completions"
            async with client.stream("POST", url, json=body) as stream:
                assert stream.status_code == 200
            engine.delay = 0.0
            await asyncio.sleep(2)
        async with client_of(endpoint) as client:
            chat: Any = client.chat.completions
            await chat.create(model="m", messages=[{"role": "user", "content": "y"}])
        return 1.0

    (row,) = rows_of(engine, Played(play))
    assert (row.counts["undelivered"], row.counts["turns"], row.failed) == (1, 1, "")
    prompt, kept = engine.given[-1]
    assert (row.prompt_ids, row.token_ids) == (prompt, kept.token_ids)


AGENT = """
import json, os, sys, urllib.request
problem = json.load(open(os.environ["POSTTRAIN_PROBLEM"]))
messages = problem["messages"]
def post(url, body):
    head = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(url, json.dumps(body).encode(), head)
    return json.load(urllib.request.urlopen(request))
chat = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
for turn in range(2):
    made = post(chat, {"model": "m", "messages": messages})["choices"][0]["message"]
    messages += [made, {"role": "user", "content": "go on"}]
assert "SECRET_OF_THE_RUN" not in os.environ
assert "answer" not in problem
"""


def agent(folder: Path, end: str, **fields: Any) -> AgentEnvironment:
    """A program of two turns that ends with the code `end`."""
    path = folder / "agent.py"
    path.write_text(AGENT + end)
    return AgentEnvironment(
        AgentConfig(command=(sys.executable, "{path}"), path=str(path), **fields)
    )


def test_a_program_of_its_own_plays_an_episode(
    engine: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_RUN", "x")
    rows = rows_of(engine, agent(tmp_path, "print('hello'); print('{\"reward\": 0.5}')"), 2)
    assert_recorded(engine, rows)
    assert [(row.reward, row.failed, len(row.turn_ends)) for row in rows] == [(0.5, "", 2)] * 2
    posted = agent(tmp_path, "post(os.environ['POSTTRAIN_REWARD_URL'], {'value': 0.75})")
    (row,) = rows_of(engine, posted)
    assert (row.reward, row.failed) == (0.75, "")


def test_an_agent_that_cannot_start_is_refused_before_the_first_episode() -> None:
    def refused(**fields: Any) -> str:
        manager = PluginManager()
        made: Any = manager.build(PlayedEnvironment, "agent", fields)
        with pytest.raises(ConfigError) as error:
            asyncio.run(made.start())
        return str(error.value)

    assert "program 'no-such-agent' was not found" in refused(command=["no-such-agent"])
    assert "path is not set" in refused(command=["python", "{path}"])
    assert "nowhere.py" in refused(command=["python", "{path}"], path="nowhere.py")
    assert "['NO_SUCH_KEY'], which are not set" in refused(
        command=["python"], pass_env=["NO_SUCH_KEY"]
    )


def test_a_program_that_fails_is_a_failed_episode_or_has_the_reward_of_one(
    engine: Recorded, tmp_path: Path
) -> None:
    (row,) = rows_of(engine, agent(tmp_path, "sys.exit('no ' + os.environ['OPENAI_API_KEY'])"))
    assert row.failed == "the program ended with exit code 1: no KEY"
    assert (row.reward, len(row.turn_ends)) == (None, 2)
    (row,) = rows_of(engine, agent(tmp_path, "sys.exit(1)", on_failure=-1.0))
    assert (row.reward, row.failed, row.counts["metric/program_failed"]) == (-1.0, "", 1.0)
    (row,) = rows_of(engine, agent(tmp_path, "", on_failure=-1.0))
    assert row.counts["metric/program_failed"] == 0.0


@pytest.mark.parametrize("how", ["kill", "hang"])
def test_no_process_of_a_program_is_left(engine: Recorded, tmp_path: Path, how: str) -> None:
    """A grandchild in its group, and one that left it, when the agent is killed or takes long."""
    pids = tmp_path / "pids"
    end = f"""
import subprocess, time
made = [subprocess.Popen(["sleep", "600"], start_new_session=apart) for apart in (False, True)]
open({str(pids)!r}, "w").write(" ".join(str(p.pid) for p in made) + f" {{os.getpid()}}")
if {how!r} == "kill":
    os.kill(os.getpid(), 9)
time.sleep(600)
"""
    (row,) = rows_of(engine, agent(tmp_path, end), episode_s=60 if how == "kill" else 5)
    left = [int(pid) for pid in pids.read_text().split()]
    assert len(left) == 3 and not any(map(process_start, left))
    wanted = "the program ended by signal 9" if how == "kill" else "the episode took more than 5 s"
    assert row.failed == wanted


def test_the_key_of_an_episode_is_not_logged(
    engine: Recorded, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys: list[str] = []

    async def play(endpoint: ModelEndpoint) -> float:
        keys.append(endpoint.key)
        async with httpx.AsyncClient() as client:
            url = f"{endpoint.base_url}/chat/completions"
            await client.post(url, json={"messages": [{"role": "user", "content": "x"}]})
            await client.post(url, json={"messages": 5})
        raise RuntimeError("the program broke")

    caplog.set_level("DEBUG", logger="posttrain")
    (row,) = rows_of(engine, Played(play))
    assert row.failed == "RuntimeError: the program broke"
    assert keys and keys[0] not in caplog.text and keys[0] not in repr(row)
