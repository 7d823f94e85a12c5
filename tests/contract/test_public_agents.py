"""Programs that know nothing of training, unchanged, at the gateway: what is kept of them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from posttrain.core.contracts import PromptGroup
from posttrain.core.gateway.runner import PlayedRunner
from posttrain.core.rollout.plays import EpisodeLimits
from posttrain.core.types import Completion, Problem, SamplingParams
from posttrain.plugins.environments.agent import AgentConfig, AgentEnvironment
from tests.helpers.gateway import Script, chat_tokenizer

pytestmark = pytest.mark.slow
PACKAGES = ("smolagents[openai]==1.26.0", "openai-agents==0.24.0")
OPENAI_AGENTS = """
import os
from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled
assert os.environ["OPENAI_AGENTS_DISABLE_TRACING"] == "1"
set_default_openai_api(os.environ["API"])
@function_tool
def add(a: int, b: int) -> int:
    "Adds."
    return a + b
found = Runner.run_sync(Agent(name="a", instructions="Add.", tools=[add], model="policy"), "2 + 3?")
print(found.final_output)
print('{"reward": %d}' % ("5" in found.final_output))
"""
SMOLAGENTS = """
import os
from smolagents import OpenAIServerModel, ToolCallingAgent, tool
@tool
def add(a: int, b: int) -> int:
    '''Adds.

    Args:
        a: one number
        b: the other
    '''
    return a + b
model = OpenAIServerModel("policy", os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
found = ToolCallingAgent(tools=[add], model=model, max_steps=3).run("2 + 3?")
print('{"reward": %d}' % (str(found) == "5"))
"""  # noqa: E501 - a program


def call(name: str, arguments: str) -> str:
    """A call as no template writes it."""
    return f'<tool_call>\n{{"arguments":  {arguments}, "name": "{name}"}}\n</tool_call>'


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("agents")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    made = folder / "bin" / "python"
    pip = [made, "-m", "pip", "install", "-q", *PACKAGES]
    if subprocess.run(pip, capture_output=True, timeout=500).returncode:
        pytest.skip("the agents' packages cannot be installed here")
    return str(made)


class Submit(Script):
    """A script in the place of an engine."""

    engine: Any = type("Engine", (), {"policy_version": 0, "name": "script"})


def played(
    python: str, folder: Path, program: str, lines: list[str], api: str = ""
) -> list[Completion]:
    path = folder / "agent.py"
    path.write_text(program)
    config = AgentConfig(command=(python, "{path}"), path=str(path), env={"API": api})
    limits = EpisodeLimits(4, 120, 120, 0.0, 100_000)
    script: Any = Submit(chat_tokenizer(), lines)
    runner = PlayedRunner(AgentEnvironment(config), chat_tokenizer(), limits, 16)
    prompt = PromptGroup(Problem("one", "2 + 3?", "5", ""), (1,))
    params = SamplingParams(max_tokens=500)

    async def episode() -> list[Completion]:
        return await runner._limited(script, prompt, params, 1)

    runner._start()
    try:
        rows = asyncio.run_coroutine_threadsafe(episode(), runner.loop).result(200)
    finally:
        runner.close()
    assert not rows[0].failed, rows[0].failed
    own = sum(
        is_sampled and not is_taken
        for row in rows
        for is_sampled, is_taken in zip(
            row.sampled or (True,) * len(row.token_ids),
            row.elsewhere or (False,) * len(row.token_ids),
            strict=True,
        )
    )
    assert own + rows[0].counts["tokens_repeated"] == sum(map(len, script.given))
    return rows


@pytest.mark.parametrize("api", ["responses", "chat_completions"])
def test_openai_agents_give_one_row_an_episode(python: str, tmp_path: Path, api: str) -> None:
    lines = [call("add", '{"b": 3, "a": 2}'), "it is  5"]
    (row,) = played(python, tmp_path, OPENAI_AGENTS, lines, api)
    assert (row.reward, row.counts["metric/continued"], len(row.turn_ends)) == (1.0, 1, 2)
    assert not row.counts["altered"]


def test_smolagents_rewrite_their_calls_so_each_turn_is_a_row(python: str, tmp_path: Path) -> None:
    lines = [call("add", '{"b": 3, "a": 2}'), call("final_answer", '{"answer": "5"}')]
    rows = played(python, tmp_path, SMOLAGENTS, lines)
    assert len(rows) == 2 and rows[0].reward == 1.0
    assert rows[0].counts["altered"] == 1
