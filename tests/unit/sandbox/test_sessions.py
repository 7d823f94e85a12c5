"""Sandboxes that live on: what is kept between commands, what a command can harm, what is left."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from posttrain.core.errors import RunError
from posttrain.core.sandbox.inside import pack, unpack
from posttrain.core.sandbox.model import SESSIONS, Level, SandboxLimits, sessions_table
from posttrain.core.sandbox.runner import Interpreter, Sandbox, guard_start, levels_available
from posttrain.core.sandbox.session import FilesError, Session, SessionLost, archive
from tests.unit.sandbox.conftest import (
    HEAVY,
    SMALL,
    interpreter_at,
    running_with,
    wait_until_gone,
    wait_until_there,
)

REPO = Path(__file__).resolve().parents[3]
T = TypeVar("T")
Play = Callable[[Callable[[Session], Awaitable[T]]], T]


def session_at(level: Level, limits: SandboxLimits = SMALL) -> Session:
    box = Sandbox(level, interpreter_at(level), limits)
    return Session(box, folders=("/app", "/logs/verifier"), cwd="/app", env={"COLOUR": "blue"})


@pytest.fixture
def play(level: Level, token: str) -> Play[object]:
    """Call a coroutine function with an open session; afterwards nothing of it may be alive."""

    def start(use: Callable[[Session], Awaitable[T]]) -> T:
        async def whole() -> T:
            session = session_at(level)
            await session.open()
            try:
                return await use(session)
            finally:
                await session.close()

        result = asyncio.run(whole())
        assert running_with(token) == []
        return result

    return start


@pytest.fixture
def holds(level: Level) -> Callable[[str], None]:
    """Skips what the level does not claim of its sessions, by the table that users read."""

    def check(name: str) -> None:
        row = next(row for row in SESSIONS if row.name == name)
        if not row.contained(level):
            pytest.skip(f"level {level} does not claim of its sessions: {name}")

    return check


Holds = Callable[[str], None]

# --- what is kept -------------------------------------------------------------------------------


def test_files_and_the_working_folder_are_kept(play: Play[None], holds: Holds) -> None:
    holds("state between commands")

    async def use(session: Session) -> None:
        made = await session.run("mkdir -p a/b; cd a/b; echo one > file; X=1")
        assert (made.status, made.output) == ("ok", b"")
        read = await session.run("cat file; basename $PWD; echo $X$COLOUR")
        assert read.text(100) == "one\nb\nblue\n"
        left = await session.run("cd ..; exit 3")
        assert (left.status, left.exit_code) == ("nonzero", 3)
        assert (await session.run("basename $(pwd)")).text(100) == "a\n"
        gone = await session.run("cd b; rm -r ../b")
        assert gone.status == "ok"
        assert (await session.run("echo here")).text(100) == "here\n"

    play(use)


def test_its_folders_are_where_they_are_said_to_be(play: Play[None], holds: Holds) -> None:
    holds("folders such as /app")

    async def use(session: Session) -> None:
        found = await session.run("pwd; find /app /logs; touch /x /usr/x")
        assert found.text(500).startswith("/app\n/app\n/logs\n/logs/verifier\ntouch:")
        assert found.text(500).count("Read-only") == 2

    play(use)


def test_files_come_in_and_out(play: Play[None], tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "run.sh").write_text("echo $0 runs\n")
    (tmp_path / "folder" / "run.sh").chmod(0o755)
    (tmp_path / "folder" / "link").symlink_to("/etc/passwd")

    async def use(session: Session) -> None:
        await session.write(archive({"/app/in": b"\x00\xff", "/app/f": tmp_path / "folder"}))
        assert (await session.run("f/run.sh; readlink f/link")).text(99) == (
            "f/run.sh runs\n/etc/passwd\n"
        )
        assert await session.read("/app/in", 99) == b"\x00\xff"
        assert await session.read("/app/in", 1) == b"\x00"
        await session.run("mkfifo pipe; ln -s pipe hidden; mkdir d")
        for path in ("none", "pipe", "hidden", "d"):
            with pytest.raises(FilesError):
                await session.read(f"/app/{path}", 99)

    play(use)


def test_a_snapshot_is_gone_back_to_and_gone_on_from(
    play: Play[None], holds: Holds, token: str
) -> None:
    holds("snapshots")

    async def use(session: Session) -> None:
        await session.run(
            "echo one > file; chmod 000 file; mkdir shut; echo two > shut/file; chmod 0 shut; "
            "ln -s /nowhere link; ln file hard; mkfifo pipe; mkdir sub; cd sub; "
            "echo x > ../../logs/x"
        )
        before = await session.snapshot()
        shown = (
            "cd ..; stat -c %a file shut; basename $PWD; chmod u+rwx file shut; "
            "cat file shut/file hard; readlink link; ls"
        )
        look = await session.run(shown)
        other = await session.fork()
        try:
            await session.run(f"rm -rf *; echo new > file; sh -c 'sleep 60; : {token}' &")
            assert (await other.run("ls | wc -w; cat file")).text(99) == "6\none\n"
        finally:
            await other.close()
        await session.restore(before)
        assert running_with(token) == [], "what ran has ended"
        again = await session.run(shown)
        assert again.output == look.output and b"0\n0\napp\none\ntwo\none\n/nowhere" in again.output
        assert await session.read("/logs/x", 9) == b"x\n"

    play(use)


@pytest.mark.parametrize(
    "program",
    [
        "for n in range(13): open(f'{n}', 'w').truncate(4 << 20)",
        "import os\nfor n in range(2500):\n    os.mkdir('d')\n    os.chdir('d')",
    ],
)
def test_files_that_cannot_be_copied_are_an_error(play: Play[None], program: str) -> None:
    async def use(session: Session) -> None:
        made = await session.run(f'{session.sandbox.interpreter.path} -c "{program}"')
        assert made.status == "ok", made
        with pytest.raises(FilesError):
            await session.snapshot()
        assert (await session.run("echo fine")).output == b"fine\n"

    play(use)


def test_a_snapshot_leaves_out_an_interpreter_that_is_shown_inside(
    level: Level, holds: Holds, token: str
) -> None:
    holds("folders such as /app")
    shown = Path("/tmp") / f"posttrain-test-{token}"
    shown.mkdir()
    (shown / "big").write_bytes(bytes(30 << 20))
    shown.chmod(0o755)

    async def whole() -> None:
        session = session_at(level)
        path = session.sandbox.interpreter.path
        interpreter = Interpreter(path, (str(shown),))
        session.sandbox = Sandbox(level, interpreter, SMALL)
        await session.open()
        try:
            assert (await session.run(f"stat -c %s {shown}/big")).output == b"31457280\n"
            snapshot = await session.snapshot()
            assert len(snapshot.files) < 1 << 20
            await session.restore(snapshot)
            assert (await session.run(f"ls {shown}")).output == b"big\n"
        finally:
            await session.close()

    try:
        asyncio.run(whole())
    finally:
        shutil.rmtree(shown)


# --- what a command can harm --------------------------------------------------------------------


def test_a_command_that_hangs_ends_alone(play: Play[None], token: str) -> None:
    async def use(session: Session) -> None:
        left = f"setsid sh -c 'sleep 60; : {token}' > /dev/null 2>&1 &"
        await session.run(f"{left} echo")
        for command in ("trap '' TERM INT HUP; sleep 60", "sleep 60 | cat; cat", "cat <&9"):
            ended = await session.run(f"{command} # {token}x", wall_s=0.7)
            assert ended.status in ("timeout", "nonzero") and ended.seconds < 5
        assert running_with(f"{token}x") == []
        assert running_with(token), "what went on in the background goes on"
        assert (await session.run("echo on")).output == b"on\n"

    play(use)


@HEAVY
def test_a_gigabyte_of_output_is_cut(play: Play[None]) -> None:
    async def use(session: Session) -> None:
        ended = await session.run("echo first; yes | head -c 1000000000; echo last", wall_s=60)
        assert ended.status == "ok" and ended.omitted > 999_900_000
        assert len(ended.output) == 64 << 10
        text = ended.text(1000)
        assert text.startswith("first\ny\n") and text.endswith("y\nlast\n") and len(text) < 1100
        assert re.search(r"\[\.\.\. 9999\d+ characters left out \.\.\.\]", text)

    play(use)


def test_a_full_disk_can_be_copied() -> None:
    """In the time that is allowed, which copies that grow with the square exceed."""

    async def whole() -> None:
        limits = SMALL.model_copy(update={"file_mib": 256, "scratch_mib": 64})
        session = session_at(levels_available()[-1], limits)
        await session.open()
        try:
            await session.run("head -c 60000000 /dev/zero > x; cp x ../logs/x", wall_s=60)
            await session.restore(await session.snapshot())
            sizes = await session.run("stat -c %s x ../logs/x", wall_s=60)
            assert sizes.output == b"60000000\n" * 2
        finally:
            await session.close()

    asyncio.run(whole())


def test_a_full_disk_is_an_error_of_the_command(play: Play[None], holds: Holds) -> None:
    holds("total size of files")

    async def use(session: Session) -> None:
        fill = "for i in $(seq 99); do head -c 1000000 /dev/urandom > $i || break; done; ls | wc -l"
        for folder in ("/app", "/tmp"):
            ended = await session.run(f"cd {folder}; {fill}")
            assert b"No space left" in ended.output and int(ended.output.split()[-1]) <= 10
        with pytest.raises(FilesError, match="No space"):
            await session.write(archive({"/app/more": bytes(1 << 20)}))
        again = await session.run("rm /app/*; echo again > /app/x; cat /app/x")
        assert again.text(9) == "again\n"

    play(use)


@pytest.mark.parametrize("command", ["kill -9 $$", "kill -9 0", "kill -9 -1", "kill -9 1 $PPID"])
def test_a_command_that_kills_its_own_shell_loses_no_files(
    play: Play[None], holds: Holds, command: str
) -> None:
    holds("state between commands")

    async def use(session: Session) -> None:
        await session.run("echo kept > file")
        await session.run(command)
        assert (await session.run("cat file")).text(99) == "kept\n"

    play(use)


def test_its_first_process_cannot_be_killed_or_stopped(play: Play[None], holds: Holds) -> None:
    holds("its first process")

    async def use(session: Session) -> None:
        for number in (9, 15, 19, 2, 11):
            await session.run(f"kill -{number} 1; kill -{number} $PPID")
        assert (await session.run("echo $PPID")).output == b"1\n"

    play(use)


def test_a_fork_bomb_that_goes_on_in_the_background_can_be_ended(play: Play[None]) -> None:
    async def use(session: Session) -> None:
        fork = "  try:\n    os.fork()\n    os.setsid()\n  except OSError: pass"
        bomb = f"import os\nwhile True:\n{fork}"
        python = session.sandbox.interpreter.path
        await session.run(f"{python} -c '{bomb}' > /dev/null 2>&1 &")
        ended = await session.run("kill -9 -1; echo on", wall_s=15)
        assert ended.status in ("ok", "killed"), ended
        assert (await session.run("true; (true); echo on")).output == b"on\n"

    play(use)


def test_memory_in_the_background_is_looked_at_too(play: Play[None], token: str) -> None:
    async def use(session: Session) -> None:
        python = session.sandbox.interpreter.path
        hold = f"x = b'x' * (120 << 20); import time; time.sleep(60) # {token}"
        ended = await session.run(f'for i in 1 2 3; do {python} -c "{hold}" & done; sleep 20')
        assert (ended.status, ended.reason) == ("killed", "memory")
        await session.run(f'for i in 1 2 3; do setsid {python} -c "{hold}" > /dev/null 2>&1 & done')
        limit = time.monotonic() + 20
        while running_with(token) and time.monotonic() < limit:
            await asyncio.sleep(0.1)
        assert running_with(token) == []

    play(use)


def test_a_command_that_breaks_the_first_process_ends_the_session(play: Play[None]) -> None:
    """It may change the limits of a process of its own uid."""

    async def use(session: Session) -> None:
        python = session.sandbox.interpreter.path
        what = "import resource, os; resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (0, 0))"
        with pytest.raises(SessionLost):
            for _ in range(3):
                await session.run(f'exec {python} -c "{what}"')

    play(use)


# --- what is left -------------------------------------------------------------------------------


def test_a_call_that_is_cut_off_leaves_nothing(play: Play[None], token: str) -> None:
    async def use(session: Session) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.run(f"sleep 60 # {token}"), 0.3)
        with pytest.raises(RunError, match="cut off"):
            await session.run("echo")

    play(use)


@HEAVY
def test_sixty_four_at_once(level: Level, token: str) -> None:
    limits = SMALL.model_copy(update={"wall_s": 120.0})

    async def one(number: int) -> bytes:
        session = session_at(level, limits)
        await session.open()
        try:
            left = "setsid sleep 600 > /dev/null 2>&1 &"
            await session.run(f"echo {number} > file; {left} : {token}")
            await session.run("sleep 0.5")
            return (await session.run("cat file")).output
        finally:
            await session.close()

    async def all_of_them() -> list[bytes]:
        return await asyncio.gather(*(one(number) for number in range(64)))

    began = time.monotonic()
    assert asyncio.run(all_of_them()) == [b"%d\n" % number for number in range(64)]
    print(f"64 sessions at {level}: {time.monotonic() - began:.1f} s")
    assert running_with(token) == []


def test_a_session_ends_with_the_process_that_made_it(level: Level, token: str) -> None:
    code = (
        "import asyncio\n"
        "from tests.unit.sandbox.test_sessions import session_at\n"
        "async def main():\n"
        f"    session = session_at({level!r})\n"
        "    await session.open()\n"
        f"    await session.run(\"setsid sh -c 'sleep 600; : {token}' > /dev/null 2>&1 &\")\n"
        f"    await session.run(\"sh -c 'sleep 600; : {token}'\", wall_s=600)\n"
        "asyncio.run(main())\n"
    )
    asking = subprocess.Popen([sys.executable, "-c", code, token], cwd=REPO)
    assert wait_until_there(token, 4)
    os.kill(asking.pid, signal.SIGKILL)
    asking.wait()
    assert wait_until_gone(token) == []


def test_a_guard_that_is_killed_takes_all_with_it(
    play: Play[None], level: Level, token: str
) -> None:
    if level == "rlimits":
        pytest.skip("there its folder, and what left the first process, would stay")

    async def use(session: Session) -> None:
        await session.run(f"setsid sh -c 'sleep 60; : {token}' > /dev/null 2>&1 &")
        assert session._guard is not None and wait_until_there(token)
        session._guard.kill()
        with pytest.raises(RunError, match="guard of a sandbox is gone"):
            await session.run("echo")
        assert wait_until_gone(token) == []

    play(use)


def test_an_unprivileged_user_has_sessions_too(level: Level, token: str, tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("this is an unprivileged user: all other tests show it")
    readable = Path("/tmp") / f"posttrain-test-{token}"
    shutil.copytree(REPO / "core" / "sandbox", readable / "sandbox")
    readable.chmod(0o755)
    box = Sandbox(level, interpreter_at(level), SMALL)
    job = box.job({"main.py": (REPO / "core/sandbox/inside.py").read_bytes()})
    job.session = True
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            guard = subprocess.Popen(
                [box.interpreter.path, "-ISBc", guard_start("session_guard", readable)]
                + [str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                user=65534,
                group=65534,
                extra_groups=[],
                env={},
                cwd="/",
            )
        ours.settimeout(30)
        begin = {"op": "begin", "folders": [], "env": {}, "wall_s": 10}
        bomb = "import os, time\nfor n in range(40):\n    if os.fork() == 0: time.sleep(60)"
        run = {"op": "run", "cwd": "/tmp", "output": 9999, "wall_s": 10}
        ours.sendall(pack({}, job.dump()) + pack(begin))
        ours.sendall(pack({**run, "command": f"exec {box.interpreter.path} -c '{bomb} # {token}'"}))
        ours.sendall(pack({**run, "command": "echo on; echo $UID"}))
        data, found = bytearray(), []
        while len(found) < 3 and (part := ours.recv(1 << 16)):
            data += part
            while (frame := unpack(data)) is not None:
                found.append(frame)
        assert len(found) == 3, found
        assert b"BlockingIOError" in found[1][1], found[1]
        assert found[2][1] == (b"on\n65534\n" if level == "rlimits" else b"on\n1000\n")
        ours.close()
        assert guard.wait(20) == 0
    finally:
        ours.close()
        shutil.rmtree(readable)
    assert running_with(token) == []


# --- the table ----------------------------------------------------------------------------------


def test_every_row_of_the_table_is_tried_and_on_the_page() -> None:
    tried = set(re.findall(r"holds\(\"([^\"]+)\"\)", Path(__file__).read_text()))
    assert tried == {row.name for row in SESSIONS}
    assert sessions_table() in (REPO / "docs" / "sandbox.md").read_text("utf-8")
