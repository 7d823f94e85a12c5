"""Agents: a command plays each episode, and knows the policy as an OpenAI-compatible API."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pydantic import Field

from posttrain.core.contracts import ModelEndpoint, Outcome, PlayedEnvironment, PluginConfig
from posttrain.core.data.messages import message_to_json
from posttrain.core.errors import ConfigError
from posttrain.core.runtime import process_guard as guard
from posttrain.core.types import Problem

logger = logging.getLogger(__name__)
INHERITED = (
    *("HOME", "LANG", "LC_ALL", "LC_CTYPE", "LOGNAME", "PATH", "SHELL", "TERM", "TZ", "USER"),
    *("TMPDIR", "VIRTUAL_ENV"),
)
"""Variables of the run that a program gets; others may hold secrets: the config names them."""
QUIET = {"OPENAI_AGENTS_DISABLE_TRACING": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""Keeps libraries from sending an episode's messages, with its key, to their vendors."""
TAIL_BYTES = 64 * 2**10
STOP_S = 2.0
"""Seconds that a program has to end itself after its episode is over."""
DRAIN_S = 1.0
POLL_S = 0.02
SHOWN = 300


class AgentConfig(PluginConfig):
    """Settings of `agent`."""

    command: tuple[str, ...] = Field(
        min_length=1, description="the program and its arguments; {path} stands for `path`"
    )
    path: str | None = Field(
        default=None, description="the program's file or folder; what it holds is part of the stage"
    )
    env: dict[str, str] = Field(default={}, description="variables that the program gets; no keys")
    pass_env: tuple[str, ...] = Field(
        default=(), description="variables of the run that the program gets, such as API keys"
    )
    timeout_s: float | None = Field(
        default=None,
        gt=0,
        le=604_800,
        description="seconds that the program may take; null = environment.episode_s alone",
    )
    give_answer: bool = Field(
        default=False,
        description="put the right answer into POSTTRAIN_PROBLEM, for programs that score "
        "themselves and let the model read no files",
    )
    on_failure: float | None = Field(
        default=None,
        description="reward of an episode whose program fails or takes more than timeout_s; null "
        "= it is not learned from",
    )


class AgentEnvironment(PlayedEnvironment[AgentConfig]):
    """reward = what the program posts, or its last line {"reward": x}; else rewards of the run.

    The program is started for each episode, in a folder of its own that is deleted afterwards. It
    finds the policy by OPENAI_BASE_URL and OPENAI_API_KEY, and its problem in the JSON file
    POSTTRAIN_PROBLEM. An exit code other than 0, a signal, a time limit or no request at all make
    the episode a failed one. When it ends, so do all processes that it started.
    Source: own; the API is that of OpenAI's chat completions.
    """

    name = "agent"
    Config = AgentConfig
    at_once = 4 * (os.cpu_count() or 1)

    def __init__(self, config: AgentConfig) -> None:
        super().__init__(config)
        place = "" if config.path is None else str(Path(config.path).expanduser().absolute())
        self._command = [part.replace("{path}", place) for part in config.command]

    async def start(self) -> None:
        """Refuse what no episode could run. Raises `ConfigError`."""
        config = self.config
        if config.path is None and any("{path}" in part for part in config.command):
            raise ConfigError("environment 'agent': command holds {path}, and path is not set")
        if config.path is not None and not Path(config.path).expanduser().exists():
            raise ConfigError(f"environment 'agent': there is no '{config.path}'; correct `path`")
        if shutil.which(self._command[0]) is None:
            raise ConfigError(
                f"environment 'agent': program '{self._command[0]}' was not found; correct "
                "`command`"
            )
        missing = [name for name in config.pass_env if name not in os.environ]
        if missing:
            raise ConfigError(
                f"environment 'agent': pass_env names {missing}, which are not set; set them where "
                "the run is started"
            )

    async def play(self, problem: Problem, endpoint: ModelEndpoint, seed: int) -> Outcome:
        """Run the program to its end."""
        with tempfile.TemporaryDirectory(
            prefix="posttrain-agent-", ignore_cleanup_errors=True
        ) as made:
            folder = Path(made)
            given = folder / "problem.json"
            shown = problem_json(problem, seed, with_answer=self.config.give_answer)
            given.write_text(json.dumps(shown), encoding="utf-8")
            (folder / "work").mkdir()
            env = self._env(endpoint, seed, given)
            ended = await _run(self._command, env, folder / "work", self.config.timeout_s)
        return self._outcome(ended)

    def _env(self, endpoint: ModelEndpoint, seed: int, problem: Path) -> dict[str, str]:
        names = (*INHERITED, *self.config.pass_env)
        kept = {name: os.environ[name] for name in names if name in os.environ}
        return {
            **kept,
            **QUIET,
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
            **self.config.env,
            "OPENAI_BASE_URL": endpoint.base_url,
            "OPENAI_API_BASE": endpoint.base_url,
            "OPENAI_API_KEY": endpoint.key,
            "OPENAI_MODEL": endpoint.model,
            "POSTTRAIN_REWARD_URL": f"{endpoint.base_url}/reward",
            "POSTTRAIN_PROBLEM": str(problem),
            "POSTTRAIN_SEED": str(seed),
        }

    def _outcome(self, ended: Ended) -> Outcome:
        paid = self.config.on_failure
        counts = {} if paid is None else {"metric/program_failed": float(bool(ended.why))}
        if not ended.why:
            return Outcome(reward=reward_in(ended.output), counts=counts)
        if ended.errors:
            logger.debug("a program ended with: %s", ended.errors)
        if paid is not None:
            return Outcome(reward=paid, counts=counts)
        return Outcome(failed=ended.why)


def problem_json(problem: Problem, seed: int, *, with_answer: bool) -> dict[str, object]:
    """What a program is given of a problem, and maybe the right answer."""
    return {
        "key": problem.key,
        "prompt": problem.prompt,
        **({"answer": problem.answer} if with_answer else {}),
        "messages": [message_to_json(message) for message in problem.messages],
        "tools": list(problem.tools),
        "metadata": dict(problem.metadata),
        "seed": seed,
    }


def reward_in(output: str) -> float | None:
    """The reward that the last line of a program's output names; None without one."""
    lines = output.strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    value = found.get("reward") if isinstance(found, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended: why it has failed (empty = it has not), and the ends of its output."""

    why: str
    output: str
    errors: str


async def _run(
    command: list[str], env: Mapping[str, str], folder: Path, limit: float | None
) -> Ended:
    """Run `command` until it ends, `limit` seconds at most, and leave no process of it."""
    # The guard stops the program when its standard input ends, which it does with this process.
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__, "--tree", str(STOP_S), *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(env),
        cwd=folder,
        start_new_session=True,
    )
    assert process.stdin is not None
    tails = [bytearray(), bytearray()]
    readers = [
        asyncio.create_task(_tail(stream, tail))
        for stream, tail in zip((process.stdout, process.stderr), tails, strict=True)
    ]
    late = False
    try:
        async with asyncio.timeout(limit):
            await _ended(process)
    except TimeoutError:
        late = True
    finally:
        process.stdin.close()
        stopping = asyncio.ensure_future(_ended(process))
        try:
            await asyncio.shield(stopping)
        except asyncio.CancelledError:
            await stopping
            raise
        finally:
            await asyncio.wait(readers, timeout=DRAIN_S)
            for reader in readers:
                reader.cancel()
    output, errors = (tail.decode(errors="replace") for tail in tails)
    why = f"the program took more than {limit:g} s" if late else ""
    if not late and process.returncode:
        code = process.returncode
        what = f"by signal {code - 128}" if code > 128 else f"with exit code {code}"
        last = errors.strip().splitlines()[-1:]
        why = f"the program ended {what}" + "".join(f": {line[:SHOWN]}" for line in last)
        why = why.replace(env["OPENAI_API_KEY"], "KEY")
    return Ended(why, output, errors)


async def _ended(process: subprocess.Popen[bytes]) -> None:
    # asyncio's own wait also waits for whatever holds the pipes.
    while process.poll() is None:
        await asyncio.sleep(POLL_S)


async def _tail(pipe: IO[bytes] | None, tail: bytearray) -> None:
    """Read all of `pipe`, and keep its end."""
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), pipe
    )
    try:
        while piece := await stream.read(TAIL_BYTES):
            tail += piece
            del tail[:-TAIL_BYTES]
    finally:
        transport.close()
