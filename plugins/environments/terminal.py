"""A shell in a sandbox of the episode's own, and the tests of a task folder at its end."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import Field

from posttrain.core.contracts import (
    LiveEnvironment,
    Observation,
    Opening,
    PluginConfig,
    ToolResult,
    Turn,
)
from posttrain.core.data.task_folders import (
    FOLDER,
    HOME,
    LOGS,
    SOLUTION,
    TESTS,
    WORKDIR,
    TaskFolder,
    read_task_folder,
)
from posttrain.core.errors import ConfigError, RunError
from posttrain.core.rollout.tool_use import answered, no_such_tool
from posttrain.core.sandbox.model import SandboxLimits, SandboxSettings
from posttrain.core.sandbox.runner import Sandbox
from posttrain.core.sandbox.session import (
    CommandResult,
    FilesError,
    Session,
    SessionLost,
    archive,
)
from posttrain.core.types import Problem, ToolCall, ToolSchema

logger = logging.getLogger(__name__)
TOOL = "bash"
VERIFIER = f"{LOGS}/verifier"
REWARD_BYTES = 1 << 16
NOT_RUN = (126, 127)
"""Exit codes of a shell that could not run its program."""
NOTE_CHARS = 200


class TerminalConfig(PluginConfig):
    """Settings of `terminal`."""

    instructions: str = Field(
        default="\n\nYou work in a Linux shell, by calls of the tool bash. When the task is done, "
        "answer without a call.",
        description="what ends the prompt",
    )
    command_s: float = Field(
        default=30.0,
        gt=0,
        le=86_400,
        description="seconds that the commands of a turn may take together; less than "
        "environment.step_s",
    )
    verifier_s: float = Field(
        default=300.0,
        gt=0,
        le=86_400,
        description="seconds that a task's tests may take, where its task.toml allows more",
    )
    timeout_reward: float | None = Field(
        default=None,
        description="reward where the tests take longer than that; null = not learned from",
    )
    max_result_chars: int = Field(
        default=4000, ge=1, description="characters of a command's output; cut in the middle"
    )
    limits: SandboxLimits = Field(
        default=SandboxLimits(cpu_s=60, processes=64, file_mib=64, scratch_mib=64, open_files=256),
        description="limits of an episode's sandbox; wall_s is set by the two above",
    )
    sandbox: SandboxSettings = Field(
        default=SandboxSettings(), description="which isolation; see docs/sandbox.md"
    )


@dataclass(slots=True)
class Terminal:
    """An episode's session, and its task, where the problem has a folder."""

    session: Session
    task: TaskFolder | None
    lost: bool = False


class TerminalEnvironment(LiveEnvironment[TerminalConfig]):
    """R = what tests/test.sh of the problem's task folder gives; without a folder no reward.

    The model calls the tool `bash`, whose result is the command's output and how it ended. A turn
    without a call ends the episode. Then the files are copied to a new sandbox, in which the tests
    run: the model's sandbox never has them. A command that breaks its sandbox, and files that
    cannot be copied, give 0; tests that cannot be run make the episode a failed one.
    Source: the task format of Harbor (Terminal-Bench 2).
    """

    name = "terminal"
    Config = TerminalConfig
    at_once = 64

    async def start(self) -> None:
        """Find the sandbox. Raises `ResourceError` or `ConfigError` where none hides files."""
        config = self.config
        self._box = await asyncio.to_thread(Sandbox.best, config.sandbox, config.limits)
        if self._box.level == "rlimits":
            raise ConfigError(
                "environment 'terminal': the sandbox level rlimits has no folders of its own and "
                "shows the files of this machine, tests included: install bubblewrap or allow user "
                "namespaces, and remove sandbox.level and sandbox.min_level"
            )

    def schemas(self) -> tuple[ToolSchema, ...]:
        """The tool `bash`."""
        command = {"type": "string", "description": "the command"}
        parameters = {"type": "object", "properties": {"command": command}, "required": ["command"]}
        described = {"name": TOOL, "description": "Run a command in the shell."}
        return ({"type": "function", "function": {**described, "parameters": parameters}},)

    async def reset(self, problem: Problem, seed: int) -> Opening:
        """A sandbox with the files of the problem's task, or an empty one."""
        folder = problem.metadata.get(FOLDER)
        task = None if folder is None else await asyncio.to_thread(read_task_folder, Path(folder))
        return Opening(Terminal(await self._opened(task), task), suffix=self.config.instructions)

    async def step(self, state: object, turn: Turn) -> Observation:
        """The output of the commands that `turn` runs, one after another."""
        assert isinstance(state, Terminal)
        said = turn.message
        if not said.tool_calls and not said.malformed:
            return Observation("", True, state)
        ends = time.monotonic() + self.config.command_s
        results = [await self._result(state, call, ends) for call in said.tool_calls]
        messages, counts = answered(said, results, self.config.max_result_chars + NOTE_CHARS)
        counts["metric/sandbox_lost"] = float(state.lost)
        return Observation("", state.lost, state, counts, messages)

    async def score(self, state: object) -> float | None:
        """The reward of the task's tests, which run in a new sandbox with the episode's files."""
        assert isinstance(state, Terminal)
        if state.task is None:
            return None
        if state.lost:
            return 0.0
        try:
            snapshot = await state.session.snapshot()
        except (FilesError, SessionLost) as error:
            logger.debug("files of an episode cannot be copied: %s", error)
            return 0.0
        await state.session.close()
        limits = self.config.limits
        box = replace(
            self._box,
            limits=limits.model_copy(update={"scratch_mib": 2 * limits.scratch_mib}),
        )
        verifier = self._session(state.task, box, (*state.session.folders, TESTS, VERIFIER))
        await verifier.open(snapshot.files)
        try:
            return await self._verdict(verifier, state.task)
        finally:
            await verifier.close()

    async def solve(self, state: object) -> bool:
        """Run the task's solution/solve.sh, where it has one."""
        assert isinstance(state, Terminal)
        task = state.task
        if task is None or not (task.path / "solution" / "solve.sh").is_file():
            return False
        await state.session.close()
        state.session = await self._opened(task, SOLUTION)
        await state.session.write(archive({SOLUTION: task.path / "solution"}))
        ended = await state.session.run(f"bash {SOLUTION}/solve.sh", wall_s=task.agent_s)
        if ended.status != "ok":
            raise RunError(f"solution/solve.sh of '{task.name}' fails: {self._shown(ended)[-300:]}")
        return True

    async def close(self, state: object) -> None:
        """End the sandbox with all that runs in it."""
        assert isinstance(state, Terminal)
        await state.session.close()

    async def _opened(self, task: TaskFolder | None, *more: str) -> Session:
        folders = (WORKDIR, HOME) if task is None else task.folders
        session = self._session(task, self._box, (*folders, *more))
        files = {} if task is None else dict(task.files)
        await session.open(await asyncio.to_thread(archive, files))
        return session

    def _session(self, task: TaskFolder | None, box: Sandbox, folders: tuple[str, ...]) -> Session:
        own = os.path.dirname(box.interpreter.path)
        path = ("/usr/local/bin", "/usr/bin", "/bin", "/usr/local/sbin", "/usr/sbin", "/sbin")
        first = () if own in path else (own,)
        env = {"HOME": HOME, "PATH": ":".join((*first, *path)), "TERM": "dumb"}
        if task is None:
            return Session(box, folders=folders, cwd=WORKDIR, env=env)
        return Session(box, folders=folders, cwd=task.workdir, env={**env, **task.env})

    async def _result(self, state: Terminal, call: ToolCall, ends: float) -> ToolResult:
        if call.name != TOOL:
            return no_such_tool([TOOL])
        command = call.arguments.get("command")
        if set(call.arguments) != {"command"} or not isinstance(command, str):
            return ToolResult("error: expected the argument 'command', a text", failed=True)
        left = ends - time.monotonic()
        if state.lost or left <= 0:
            why = "the sandbox has ended" if state.lost else "no time is left in this turn"
            return ToolResult(f"error: {why}", failed=True)
        try:
            ended = await state.session.run(command, wall_s=left)
        except SessionLost:
            state.lost = True
            return ToolResult("error: the sandbox has ended", failed=True)
        return ToolResult(self._shown(ended), failed=ended.status in ("timeout", "killed"))

    def _shown(self, ended: CommandResult) -> str:
        """What the model reads of a command."""
        text = ended.text(self.config.max_result_chars)
        if text and not text.endswith("\n"):
            text += "\n"
        if ended.status == "timeout":
            return f"{text}[stopped: it {ended.reason}]"
        if ended.status == "killed":
            return f"{text}[killed: {ended.reason}]"
        return f"{text}[exit code {ended.exit_code}]"

    async def _verdict(self, verifier: Session, task: TaskFolder) -> float:
        """What the tests say. Raises `RunError` where they say nothing."""
        await verifier.write(archive({TESTS: task.path / "tests"}))
        limit = min(task.verifier_s, self.config.verifier_s)
        ended = await verifier.run(f"bash {TESTS}/test.sh", wall_s=limit)
        logger.debug("tests of '%s': %s", task.name, self._shown(ended))
        if ended.status == "timeout":
            if self.config.timeout_reward is not None:
                return self.config.timeout_reward
            raise RunError(f"the tests of '{task.name}' took more than {limit:g} s")
        reward = await _written(verifier, task)
        if reward is not None:
            return reward
        if ended.status == "killed" or ended.exit_code in NOT_RUN:
            raise RunError(f"the tests of '{task.name}' could not run: {self._shown(ended)[-300:]}")
        return float(ended.exit_code == 0)


async def _written(verifier: Session, task: TaskFolder) -> float | None:
    """The reward in reward.txt or reward.json; None where there is neither."""
    for name in ("reward.txt", "reward.json"):
        try:
            text = await verifier.read(f"{VERIFIER}/{name}", REWARD_BYTES)
        except FilesError:
            continue
        try:
            value: Any = json.loads(text)  # a number, or an object of numbers
            reward = float(value["reward"] if isinstance(value, dict) else value)
        except (ValueError, TypeError, KeyError):
            reward = math.nan
        if not math.isfinite(reward):
            said = text[:60].decode(errors="replace").strip()
            raise RunError(
                f"the tests of '{task.name}' wrote {said!r} into {name}, expected a number, or in "
                'reward.json {"reward": number}'
            )
        return reward
    return None
