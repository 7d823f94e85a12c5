"""One sandbox per level that works here, and a look for processes left behind after each test."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from posttrain.core.sandbox.model import CAPABILITIES, LEVELS, Level, SandboxLimits, SandboxResult
from posttrain.core.sandbox.runner import Interpreter, Sandbox, probe
from posttrain.core.sandbox.session import Session, archive

Run = Callable[..., SandboxResult]
SMALL = SandboxLimits(
    wall_s=20,  # a loaded machine is slow; what must not last is given less
    cpu_s=5,
    memory_mib=256,
    processes=12,
    file_mib=4,
    scratch_mib=8,
    open_files=32,
    output_kib=64,
)


def running_with(token: str) -> list[int]:
    """Pids whose command line or environment holds `token`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            text = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if token.encode() in text and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def wait_until_there(token: str, count: int = 1, seconds: float = 60.0) -> bool:
    """Whether at least `count` run within `seconds`: one that just begins has no arguments."""
    limit = time.monotonic() + seconds
    while (few := len(running_with(token)) < count) and time.monotonic() < limit:
        time.sleep(0.02)
    return not few


def wait_until_gone(token: str, seconds: float = 5.0) -> list[int]:
    """What still runs after at most `seconds`."""
    limit = time.monotonic() + seconds
    while (left := running_with(token)) and time.monotonic() < limit:
        time.sleep(0.02)
    return left


def interpreter_at(level: Level) -> Interpreter:
    """The interpreter with which `level` works here; skips when it does not."""
    found = next(item for item in probe() if item.level == level)
    if found.interpreter is None:
        pytest.skip(f"level {level} is not there: {found.detail}")
    return found.interpreter


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Level:
    """Each level."""
    chosen: Level = request.param
    interpreter_at(chosen)
    return chosen


HEAVY = pytest.mark.parametrize(
    "level",
    [
        level if level == "bubblewrap" else pytest.param(level, marks=pytest.mark.slow)
        for level in LEVELS
    ],
    indirect=True,
)
"""For tests that take seconds: every level among the slow ones, the strongest always."""


@pytest.fixture
def claims(level: Level) -> Callable[[str], None]:
    """Skips what the level does not claim to contain, by the table that users read."""

    def check(name: str) -> None:
        row = next(row for row in CAPABILITIES if row.name == name)
        if not row.contained(level):
            pytest.skip(f"level {level} does not claim to contain: {name}")

    return check


@pytest.fixture
def token() -> str:
    """Marks the processes of one test."""
    return "sandboxed-" + secrets.token_hex(8)


@pytest.fixture
def guards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pids of the guards that this test started: another worker's sandboxes may run next to it."""
    pids: list[int] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            pids.append(self.pid)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    return pids


@pytest.fixture
def program(level: Level, token: str, guards: list[int]) -> Iterator[Run]:
    """Run a program with the small limits; afterwards nothing of it may be alive."""

    def start(source: str, *, stdin: bytes | None = None, **limits: object) -> SandboxResult:
        changed = SMALL.model_copy(update=limits)
        box = Sandbox(level, interpreter_at(level), changed)
        files: Mapping[str, bytes] = {}
        result = box.run(source, stdin=stdin, arguments=[token], files=files)
        assert result.status != "error", result.reason
        assert running_with(token) == []
        return result

    yield start
    assert running_with(token) == []
    if os.getuid() == 0:
        own = {uid for pid in guards for uid in (0x70000000 + pid, 30000 + pid % 30000)}
        assert not owners_of_processes() & own


@pytest.fixture
def run(program: Run) -> Run:
    """What a test calls to run a program; some tests put it into a session instead."""
    return program


@pytest.fixture
def in_session(level: Level, token: str) -> Run:
    """Run a program as the only command of a session."""

    def start(source: str, *, stdin: bytes | None = None, **limits: object) -> SandboxResult:
        box = Sandbox(level, interpreter_at(level), SMALL.model_copy(update=limits))
        made = {"/tmp/main.py": source.encode("utf-8", "surrogatepass"), "/tmp/in": stdin or b""}
        command = f"exec {box.interpreter.path} -B main.py {token} <in 2>err"

        async def play() -> SandboxResult:
            session = Session(box, folders=("/tmp",))
            await session.open(archive({name: data for name, data in made.items()}))
            try:
                ended = await session.run(command)
                errors = await session.read("/tmp/err", 1 << 20)
            finally:
                await session.close()
            reason = {-24: "cpu", -9: "signal 9"}.get(ended.exit_code or 0, ended.reason)
            status = "killed" if reason and ended.status != "timeout" else ended.status
            return SandboxResult(
                status, ended.exit_code, ended.output, errors, ended.seconds, level, reason
            )

        result = asyncio.run(play())
        assert running_with(token) == []
        return result

    return start


def owners_of_processes() -> set[int]:
    """Uids of all that lives."""
    owners = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            owners.add(entry.stat().st_uid)
    return owners
