"""The environment `mcp`, with real servers over stdio and HTTP that fail in each way."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import ValidationError

from posttrain.core.contracts import Turn
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import ConfigError, ResourceError
from posttrain.core.kit.tiny import END, make_tiny_tokenizer
from posttrain.core.types import Message, ToolCall
from posttrain.plugins.environments.mcp import McpConfig, McpEnvironment
from tests.helpers.live_turns import called, during, played, problem, said, texts

HELPERS = Path(__file__).resolve().parents[2] / "helpers"
PROGRAM = {"command": [sys.executable, str(HELPERS / "mcp_server.py")]}
RAW = {"command": [sys.executable, str(HELPERS / "raw_mcp_server.py")]}


def environment(*servers: Any, **fields: Any) -> McpEnvironment:
    return McpEnvironment(McpConfig.model_validate({"servers": list(servers), **fields}))


def start_http() -> tuple[subprocess.Popen[bytes], dict[str, str]]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, str(HELPERS / "mcp_server.py"), str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(600):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return process, {"url": f"http://127.0.0.1:{port}/mcp"}
        time.sleep(0.05)
    raise AssertionError("the server did not start")


@pytest.fixture(scope="module")
def http() -> Iterator[dict[str, str]]:
    process, server = start_http()
    yield server
    process.kill()
    process.wait()


@pytest.fixture(params=["stdio", "http"])
def server(request: pytest.FixtureRequest) -> Any:
    return PROGRAM if request.param == "stdio" else request.getfixturevalue("http")


def test_tools_are_listed_and_calls_are_answered_by_messages(server: Any) -> None:
    env = environment(server, session="run", timeout_s=1.0, max_calls=12)
    turns = [
        called("add", a=2, b=3),
        called("add", a="two"),
        called("ad", a=1, b=1),
        called("slow", seconds=20),
        called("picture"),
        called("add", a=1, b=1),
        said("5"),
    ]
    _, found = during(env, lambda e: played(e, turns))
    answers = texts(found)
    assert answers[0] == "5" and answers[5] == "2"
    assert answers[1].startswith("Error executing tool add")
    assert answers[2].startswith("error: no such tool; the tools are add, ")
    assert answers[3] == "error: no answer within 1 seconds"
    assert answers[4] == "[image omitted]"
    assert [f.counts.get("metric/omitted") for f in found] == [0.0] * 4 + [1.0, 0.0, None]
    assert [f.counts.get("failed") for f in found] == [0.0, 1.0, 1.0, 1.0, 0.0, 0.0, None]
    assert [f.done for f in found] == [False] * 6 + [True]
    (message,) = found[0].messages
    assert (message.role, message.name, message.tool_call_id) == ("tool", "add", "call00000")
    schema = next(s["function"] for s in env.schemas() if s["function"]["name"] == "add")
    assert schema["description"] == "Adds two numbers."
    assert schema["parameters"]["required"] == ["a", "b"]


def test_a_server_that_ends_fails_its_episode_with_one_sentence() -> None:
    async def both(env: Any) -> None:
        with pytest.raises(ConnectionError, match="ended during a call: the disk is on fire"):
            await played(env, [called("add", a=1, b=1), called("crash")])
        # Another episode has a server of its own.
        assert texts((await played(env, [called("count")]))[1]) == ["1"]

    during(environment(PROGRAM), both)


def test_an_http_server_that_ends_fails_all_its_calls_and_cancels_nobody() -> None:
    process, server = start_http()

    async def crash(env: Any) -> None:
        waits = asyncio.create_task(played(env, [called("slow", seconds=30)]))
        await asyncio.sleep(0.5)
        crashes = asyncio.create_task(played(env, [called("crash")]))
        found = await asyncio.gather(waits, crashes, return_exceptions=True)
        assert [type(error) for error in found] == [ConnectionError, ConnectionError]
        with pytest.raises(ConnectionError, match="ended"):
            await played(env, [called("add", a=1, b=1)])

    try:
        during(environment(server, session="run"), crash)
    finally:
        process.kill()
        process.wait()


def test_a_line_without_an_end_ends_the_server_at_once(server: Any) -> None:
    async def huge(env: Any) -> float:
        began = time.perf_counter()
        with pytest.raises(ConnectionError, match="passed 1000000 bytes"):
            await played(env, [called("huge", size=50_000_000)])
        return time.perf_counter() - began

    env = environment(server, max_result_bytes=1_000_000)
    assert during(env, huge) < 20  # the library's own reader takes minutes
    _, found = during(environment(server), lambda e: played(e, [called("huge", size=500_000)]))
    assert len(texts(found)[0]) == 2000  # max_result_chars


def test_a_blocking_tool_is_an_error_of_the_call(server: Any) -> None:
    _, found = during(
        environment(server, timeout_s=0.5), lambda e: played(e, [called("blocking", seconds=2)])
    )
    assert texts(found) == ["error: no answer within 0.5 seconds"]


def test_what_is_no_message_and_no_result_harms_nobody() -> None:
    stubborn = {"command": [*RAW["command"], "stubborn"]}
    env = environment(stubborn, timeout_s=5.0)
    turns = [called("odd"), called("text"), called("odd")]
    _, found = during(env, lambda e: played(e, turns))
    assert texts(found)[1] == "well"
    assert texts(found)[0] == texts(found)[2] == "error: the tool's result could not be read"
    assert [s["function"]["name"] for s in env.schemas()] == ["odd", "text"]  # of two pages
    assert not programs("raw_mcp_server.py")


def test_several_calls_of_a_turn_and_calls_that_cannot_be_read() -> None:
    calls = tuple(ToolCall("add", {"a": n, "b": n}, f"call0000{n}") for n in range(3))
    turn = Turn("", True, Message("assistant", tool_calls=calls, malformed=("{",)))
    env = environment(PROGRAM, max_calls=2)
    _, (found,) = during(env, lambda e: played(e, [turn]))
    assert [m.content for m in found.messages[:3]] == ["0", "2", "error: no call is left of 2"]
    assert found.messages[3].content.startswith("error: the tool call could not be read")
    assert found.counts == {"calls": 4.0, "failed": 2.0, "metric/omitted": 0.0}


def test_what_a_tool_says_is_text_for_the_model() -> None:
    _, (found,) = during(environment(PROGRAM), lambda e: played(e, [called("inject")]))
    tokenizer = ChatTokenizer(make_tiny_tokenizer(), None)
    ids = tokenizer.encode_text(found.messages[0].content, special=False)
    control = tokenizer.tokenizer.convert_tokens_to_ids(END)
    assert END in found.messages[0].content and control not in ids


def test_a_program_gets_the_variables_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sesame-123")
    monkeypatch.setenv("UNNAMED_SECRET", "hidden")
    server = {**PROGRAM, "pass_env": ["MY_KEY"], "env": {"GREETING": "hello"}}
    env = environment(server)
    assert "sesame" not in str(env.config.model_dump())
    assert texts(during(env, lambda e: played(e, [called("secret")]))[1]) == [
        "sesame-123 hello none"
    ]
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ResourceError, match="the environment variable 'MY_KEY'.*not set"):
        during(environment(server), lambda e: played(e, []))


def test_a_cancelled_step_leaves_nothing_behind() -> None:
    async def cut(env: Any) -> int:
        opening = await env.reset(problem(), 0)
        found = await env.step(opening.state, called("child"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(env.step(opening.state, called("slow", seconds=60)), 0.3)
        await env.close(opening.state)
        return int(found.messages[0].content)

    child = during(environment(PROGRAM), cut)
    assert not programs("mcp_server.py")
    assert ended(child)


@pytest.mark.parametrize(
    ("servers", "fields", "error", "says"),
    [
        ([{"command": ["no-such-program"]}], {}, ResourceError, "No such file or directory"),
        ([{"command": [sys.executable, "-c", "1/0"]}], {}, ResourceError, "ZeroDivisionError"),
        ([{"url": "http://127.0.0.1:9/mcp"}], {}, ResourceError, "http://127.0.0.1:9/mcp"),
        ([RAW], {"allow": ["txet"]}, ConfigError, "'txet'; did you mean 'text'"),
        ([RAW, RAW], {}, ConfigError, "two servers have a tool 'odd'"),
        (
            [{"command": [sys.executable, "-c", "import time; time.sleep(60)"]}],
            {"start_s": 0.5},
            ResourceError,
            "within 0.5 s",
        ),
    ],
)
def test_what_cannot_start_is_refused_in_a_sentence(
    servers: Any, fields: Any, error: Any, says: str
) -> None:
    with pytest.raises(error, match=".+") as raised:
        during(environment(*servers, **fields), lambda e: played(e, []))
    assert says in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("server", "says"),
    [
        ({}, "either a command or a url"),
        ({"command": ["a"], "url": "http://h/mcp"}, "either a command or a url"),
        ({"url": "http://user:pw@h/mcp"}, "holds no key"),
        ({"url": "ftp://h"}, "expected a URL"),
        (
            {"command": ["a"], "env": {"API_KEY": "sk-123"}},
            "export API_KEY, and name it in pass_env",
        ),
        ({"command": ["a"], "pass_env": ["a key"]}, "pattern"),
        ({"url": "http://h/mcp", "headers_env": {"X": "a key"}}, "pattern"),
    ],
)
def test_configs_that_are_refused(server: Any, says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        environment(server)


def programs(name: str) -> list[int]:
    """Servers that this process started over stdio, and that still run."""
    children = psutil.Process(os.getpid()).children(recursive=True)
    running = [p for p in children if p.status() != psutil.STATUS_ZOMBIE]
    return [p.pid for p in running if name in str(p.cmdline()) and not p.cmdline()[-1].isdigit()]


def ended(pid: int) -> bool:
    """Whether a process that was killed is gone, or waits for whoever inherited it."""
    for _ in range(100):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False
