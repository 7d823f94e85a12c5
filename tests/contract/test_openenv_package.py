"""The environment `openenv` at the package's own server, which runs in a Python of its own."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from posttrain.core.contracts import Turn
from posttrain.plugins.environments.openenv import OpenEnvConfig, OpenEnvEnvironment
from tests.helpers import openenv_server
from tests.helpers.live_turns import called, during, played, problem, said, texts

pytestmark = pytest.mark.slow
PACKAGE = "openenv==0.10.0"
GAME = Path(openenv_server.__file__).with_name("openenv_game.py")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("openenv")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    made = folder / "bin" / "python"
    pip = [made, "-m", "pip", "install", "-q", PACKAGE]
    if subprocess.run(pip, capture_output=True, timeout=500).returncode:
        pytest.skip(f"{PACKAGE} cannot be installed here")
    return str(made)


@contextmanager
def served(python: str, sessions: int) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([python, str(GAME), str(port), str(sessions)])
    try:
        end = time.monotonic() + 90
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < end, "the server is not up"
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def environment(url: str, **fields: Any) -> OpenEnvEnvironment:
    return OpenEnvEnvironment(
        OpenEnvConfig.model_validate({"url": url, "show": ["text"], **fields})
    )


def guess(number: int) -> Turn:
    return called("act", guess=number)


def test_episodes_of_several_seeds_with_faults_between_them(python: str) -> None:
    with served(python, sessions=16) as url:

        async def many(env: Any) -> list[Any]:
            turns = [guess(1), said("7"), called("act", guess="x"), guess(13), guess(7)]
            one = played(env, turns, problem(17))
            others = [played(env, [guess(n)], problem(n)) for n in range(10)]
            return list(await asyncio.gather(one, *others))

        env = environment(url)
        (opening, found), *others = during(env, many)
        assert opening == "\n\nGuess a digit."
        refused = "error: the environment refused the action"
        assert texts(found) == ["no", "error: call `act`", refused, refused, "yes"]
        assert [f.reward for f in found] == [0.0, 0.0, 0.0, 0.0, 1.0] and found[-1].done
        assert "bug" not in str(found)
        assert all(texts(answers) == ["yes"] and answers[0].done for _, answers in others)
        (schema,) = env.schemas()
        assert "guess" in schema["function"]["parameters"]["properties"]
        # What the model wrote as the action, without a function.
        env = environment(url, action={"guess": "{text}"})
        _, found = during(env, lambda e: played(e, [said("3"), said("7")]))
        assert texts(found) == ["no", "yes"]


def test_episodes_wait_for_the_server_s_one_session(python: str) -> None:
    with served(python, sessions=1) as url:

        async def four(env: Any) -> list[Any]:
            return list(await asyncio.gather(*(played(env, [guess(7)]) for _ in range(4))))

        assert [texts(found) for _, found in during(environment(url), four)] == [["yes"]] * 4
