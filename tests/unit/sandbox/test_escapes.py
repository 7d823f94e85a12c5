"""Attempts to get out of the sandbox, at each level that works here, by a program and in a session.

`claims` skips a test where the level does not claim to contain what it tries. Over 300 lines
because every attempt is here, in one list to go through.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from posttrain.core.sandbox.model import CAPABILITIES, Level, SandboxResult

REPO = Path(__file__).resolve().parents[3]
Claims = Callable[[str], None]
Run = Callable[..., SandboxResult]


@pytest.fixture(params=["program", "session"])
def run(request: pytest.FixtureRequest, program: Run, in_session: Run) -> Run:
    """The attempt as a program of its own, and as a command of a sandbox that lives on."""
    return program if request.param == "program" else in_session


def words(result: SandboxResult) -> list[str]:
    """What the program printed."""
    return result.stdout.decode().split()


ATTEMPT = """
def attempt(name, action):
    try:
        print(name, "DONE", action())
    except BaseException as error:
        print(name, "failed", type(error).__name__)
"""

# --- files, environment, descriptors ------------------------------------------------------------


def test_files_outside_cannot_be_read(run: Run, claims: Claims, tmp_path: Path) -> None:
    claims("files")
    secret = tmp_path / "secret.txt"
    secret.write_text("host secret")
    secret.chmod(0o644)
    tmp_path.chmod(0o755)
    paths = ["/etc/shadow", "/etc/passwd", str(secret), str(REPO / "pyproject.toml"), __file__]
    folders = ["/root", "/home", "/var", "/sys", str(REPO), "/run"]
    result = run(
        ATTEMPT
        + f"import os\nfor p in {paths!r}: attempt(p, lambda: open(p, 'rb').read())\n"
        + f"for p in {folders!r}: attempt(p, lambda: os.listdir(p))\n"
        + "attempt('up', lambda: os.listdir('/tmp/../../root'))\n"
        # A session has the links of Debian's alternatives there.
        + "attempt('etc', lambda: [n for n in os.listdir('/etc') if n != 'alternatives'][0])\n"
    )
    assert words(result).count("failed") == len(paths) + len(folders) + 2
    assert b"DONE" not in result.stdout


def test_other_processes_cannot_be_looked_at(run: Run, claims: Claims) -> None:
    claims("host processes")
    mine = os.getpid()
    result = run(
        ATTEMPT
        + f"for p in ('/proc/{mine}/environ', '/proc/1/environ', '/proc/self/environ'):\n"
        + "    attempt(p, lambda: open(p, 'rb').read())\n"
        + "import os\nprint(os.getpid() < 20, os.getppid() < 20)\n"
    )
    assert words(result).count("failed") == 3
    assert words(result)[-2:] == ["True", "True"]


def test_nothing_outside_the_scratch_folder_can_be_written(
    run: Run, claims: Claims, tmp_path: Path
) -> None:
    claims("writes")
    tmp_path.chmod(0o777)
    folders = ["/", "/usr", "/usr/lib", "/box", "/dev", "/dev/shm", "/var/tmp", str(tmp_path)]
    result = run(
        ATTEMPT
        + f"for p in {folders!r}: attempt(p, lambda: open(p + '/x', 'w').write('x'))\n"
        + "import os\nattempt('rm', lambda: os.remove('/box/main.py'))\n"
        + "attempt('chmod', lambda: os.chmod('/box/main.py', 0o777))\n"
        + "attempt('mine', lambda: open('x', 'w').write('x'))\n"
    )
    assert words(result)[-3:] == ["mine", "DONE", "1"]
    assert words(result).count("failed") == len(folders) + 2
    assert list(tmp_path.iterdir()) == []


def test_the_scratch_folder_is_limited(run: Run, claims: Claims) -> None:
    claims("writes")
    result = run(
        ATTEMPT
        + "def fill():\n    for i in range(10): open(f'f{i}', 'wb').write(bytes(3 << 20))\n"
        + "attempt('fill', fill)\n"
    )
    assert words(result) == ["fill", "failed", "OSError"]


def test_the_environment_is_not_inherited(
    run: Run, claims: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims("environment")
    monkeypatch.setenv("MY_API_KEY", "host secret")
    result = run("import os\nprint(dict(os.environ))")
    assert b"PATH" in result.stdout
    assert b"MY_API_KEY" not in result.stdout and b"host secret" not in result.stdout


def test_descriptors_are_not_inherited(run: Run, claims: Claims, tmp_path: Path) -> None:
    claims("descriptors")
    descriptor = os.open(tmp_path / "open", os.O_CREAT | os.O_RDWR)
    os.set_inheritable(descriptor, True)
    try:
        result = run(
            "import os\n"
            "def is_open(n):\n"
            "    try:\n        os.fstat(n)\n        return True\n"
            "    except OSError:\n        return False\n"
            "print([n for n in range(4096) if is_open(n)])\n"
        )
    finally:
        os.close(descriptor)
    # The last is a session's own pipe, by which its shell says where it ended.
    assert result.stdout in (b"[0, 1, 2]\n", b"[0, 1, 2, 9]\n")


def test_links_left_in_the_scratch_folder_lead_nobody_anywhere(run: Run, tmp_path: Path) -> None:
    secret = tmp_path / "kept"
    secret.mkdir()
    (secret / "file").write_text("host secret")
    before = set(os.listdir(tempfile.gettempdir()))
    result = run(
        "import os\n"
        f"os.symlink({str(secret)!r}, 'folder')\n"
        f"os.symlink({str(secret / 'file')!r}, 'file')\n"
        "os.symlink('/', 'root')\nos.symlink('.', 'loop')\n"
        "os.makedirs('a/b')\nos.symlink('../..', 'a/b/up')\nos.chmod('a/b', 0)\nos.chmod('a', 0)\n"
    )
    assert result.status == "ok"
    assert (secret / "file").read_text() == "host secret"
    assert b"host secret" not in result.stdout + result.stderr
    new = set(os.listdir(tempfile.gettempdir())) - before
    left = {name for name in new if name.startswith("posttrain-sandbox-")}
    # Folders of another worker's sandboxes vanish; what this one left would stay.
    limit = time.monotonic() + 60
    while left and time.monotonic() < limit:
        time.sleep(0.1)
        left &= set(os.listdir(tempfile.gettempdir()))
    assert not left


# --- network and other processes ----------------------------------------------------------------


def test_no_server_of_the_host_can_be_reached(run: Run, claims: Claims, token: str) -> None:
    claims("network")
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as local,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
    ):
        local.bind("\0" + token)
        local.listen()
        udp.bind(("127.0.0.1", 0))
        for server in (tcp, local, udp):
            server.setblocking(False)
        port = tcp.getsockname()[1]
        # The way in is open from here.
        socket.create_connection(("127.0.0.1", port), 1).close()
        tcp.accept()[0].close()
        result = run(
            ATTEMPT
            + "import socket\n"
            + f"attempt('tcp', lambda: socket.create_connection(('127.0.0.1', {port}), 2))\n"
            + "attempt('unix', lambda: socket.socket(socket.AF_UNIX)"
            + f".connect({chr(0) + token!r}))\n"
            + "attempt('udp', lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)"
            + f".sendto(b'x', ('127.0.0.1', {udp.getsockname()[1]})))\n"
            + "attempt('out', lambda: socket.create_connection(('1.1.1.1', 53), 2))\n"
        )
        for server in (tcp, local):
            with pytest.raises(BlockingIOError):
                server.accept()
        with pytest.raises(BlockingIOError):
            udp.recv(1)
    # At the other levels a datagram may be taken by the namespace's own, unconnected loopback.
    assert [line for line in result.stdout.decode().splitlines() if "DONE" in line] in (
        [],
        ["udp DONE 1"],
    )


def test_sockets_are_of_the_families_that_are_listed(run: Run, claims: Claims) -> None:
    """Others reach the machine below (vsock) or kernel code that no program here needs."""
    claims("kernel surface")
    result = run(
        "import socket, asyncio\n"
        "made = []\n"
        "for family in range(64):\n"
        "    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):\n"
        "        for make in (socket.socket, socket.socketpair):\n"
        "            try:\n"
        "                made.append((make(family, kind), family)[1])\n"
        "            except OSError:\n"
        "                pass\n"
        "async def main(): return 5\n"
        "print(set(made), asyncio.run(main()))\n"
    )
    assert result.stdout == b"{1} 5\n", result.stderr


def test_other_processes_cannot_be_signalled(run: Run, claims: Claims) -> None:
    claims("signals")
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    # Inside, 1 is a process of the sandbox's own.
    outside = {victim.pid, os.getpid(), os.getppid()} - {1}
    try:
        result = run(
            ATTEMPT
            + "import os\n"
            + f"for p in {sorted(outside)}:\n"
            + "    attempt(p, lambda: os.kill(p, 9))\n"
            + "attempt('init', lambda: os.kill(1, 9))\n"
            + "os.kill(-1, 9)\n"
        )
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()
    assert result.stdout.count(b"failed") >= len(outside)


def test_root_hands_programs_to_a_uid_that_may_signal_nobody(run: Run) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can change to another uid")
    result = run(ATTEMPT + f"import os\nattempt('parent', lambda: os.kill({os.getpid()}, 0))\n")
    assert words(result)[1] == "failed"


# --- limits -------------------------------------------------------------------------------------


def test_a_fork_bomb_stops_at_the_limit(run: Run, claims: Claims) -> None:
    claims("fork bomb")
    result = run(
        "import os, time\nstarted = 0\n"
        "try:\n"
        "    while started < 500:\n"
        "        if os.fork() == 0:\n            time.sleep(60)\n            os._exit(0)\n"
        "        started += 1\n"
        "except OSError:\n    pass\n"
        "print(started)\n",
        processes=12,
    )
    assert 8 <= int(result.stdout) <= 12


def test_a_fork_bomb_that_goes_on_is_killed_whole(run: Run, claims: Claims) -> None:
    claims("process tree")
    result = run(
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n",
        wall_s=1.0,
        cpu_s=30,
    )
    assert result.status == "timeout"
    assert result.seconds < 10


def test_a_memory_bomb_fails_in_its_own_process(run: Run, claims: Claims) -> None:
    claims("memory")
    result = run("x = bytearray(1 << 30)\n")
    assert result.status == "nonzero" and b"MemoryError" in result.stderr


def test_a_memory_bomb_of_many_processes_is_killed(run: Run, claims: Claims) -> None:
    claims("memory")
    result = run(
        "import os, time\n"
        "for _ in range(6):\n    if os.fork() == 0:\n        break\n"
        "x = b'x' * (120 << 20)\ntime.sleep(15)\n"
    )
    assert (result.status, result.reason) == ("killed", "memory")


def test_endless_output_is_cut_and_ended(program: Run, claims: Claims) -> None:
    claims("output")
    for stream in ("stdout", "stderr"):
        result = program(f"import sys\nwhile True:\n    sys.{stream}.write('x' * 9999)\n")
        assert (result.status, result.reason) == ("killed", "output") and result.seconds < 10
        assert len(getattr(result, stream)) == 64 << 10


def test_a_busy_loop_runs_out_of_cpu_seconds(run: Run, claims: Claims) -> None:
    claims("cpu")
    result = run("while True:\n    pass\n", cpu_s=1)
    assert (result.status, result.reason) == ("killed", "cpu")


def test_sleeping_is_ended_by_the_clock(run: Run, claims: Claims) -> None:
    claims("wall clock")
    result = run(
        "import signal, time\n"
        "for n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\n"
        "print('before', flush=True)\ntime.sleep(60)\n",
        wall_s=1.0,
    )
    assert result.status == "timeout" and result.stdout == b"before\n"
    assert 1.0 <= result.seconds < 5


@functools.cache
def bomb() -> bytes:
    """1.3 MB that become 300 MB."""
    return zlib.compress(bytes(300 << 20), 1)


def test_a_zip_bomb_does_not_fill_the_memory(run: Run, claims: Claims) -> None:
    claims("memory")
    result = run(
        "import sys, zlib\nprint(len(zlib.decompress(sys.stdin.buffer.read())))\n", stdin=bomb()
    )
    assert b"MemoryError" in result.stderr or (result.status, result.reason) == ("killed", "memory")
    assert result.stdout == b""


def test_a_zip_bomb_does_not_fill_the_disk(run: Run, claims: Claims) -> None:
    claims("file size")
    result = run(
        ATTEMPT
        + "import os, sys, zlib\nleft = sys.stdin.buffer.read()\nunzip = zlib.decompressobj()\n"
        + "def extract():\n"
        + "    global left\n"
        + "    with open('out', 'wb', buffering=0) as out:\n"
        + "        while left:\n"
        + "            out.write(unzip.decompress(left, 1 << 20))\n"
        + "            left = unzip.unconsumed_tail\n"
        + "import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        + "attempt('disk', extract)\nprint(os.path.getsize('out'))\n",
        stdin=bomb(),
    )
    assert words(result) == ["disk", "failed", "OSError", str(4 << 20)]


def test_open_files_are_limited(run: Run, claims: Claims) -> None:
    claims("open files")
    result = run(
        "kept = []\n"
        "try:\n    while len(kept) < 500: kept.append(open('/dev/null'))\n"
        "except OSError: pass\n"
        "print(len(kept))\n"
    )
    assert int(result.stdout) <= 32


def test_stdin_is_empty(run: Run) -> None:
    result = run("import sys\nprint(repr(sys.stdin.read()))\ninput()\n")
    assert result.stdout == b"''\n" and b"EOFError" in result.stderr


def test_a_grandchild_in_its_own_session_that_keeps_the_pipe_holds_nobody_up(
    run: Run, claims: Claims
) -> None:
    claims("process tree")
    result = run(
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(60)\n"
        "    os._exit(0)\n"
        "os.wait()\nprint('done')\n"
    )
    assert result.status == "ok" and result.stdout == b"done\n"
    assert result.seconds < 10


def test_the_kernel_offers_no_tools_for_more(run: Run, claims: Claims) -> None:
    claims("kernel surface")
    result = run(
        ATTEMPT
        + "import ctypes, os\n"
        + "libc = ctypes.CDLL(None, use_errno=True)\n"
        + "def call(name, *arguments):\n"
        + "    if getattr(libc, name)(*arguments) < 0: raise OSError(ctypes.get_errno())\n"
        + "attempt('userns', lambda: call('unshare', 0x10000000))\n"
        + "attempt('mount', lambda: call('mount', b'x', b'/tmp', b'tmpfs', 0, 0))\n"
        + "attempt('chroot', lambda: os.chroot('/tmp'))\n"
        + "attempt('trace', lambda: call('ptrace', 0, 0, 0, 0))\n"
        + "attempt('memory', lambda: os.memfd_create('x'))\n"
        + "attempt('segment', lambda: call('shmget', 0, 1 << 20, 0o1600))\n"
        + "attempt('root', lambda: os.setuid(0))\n"
        + "attempt('limit', lambda: __import__('resource')"
        + ".setrlimit(__import__('resource').RLIMIT_NPROC, (999, 999)))\n"
    )
    assert words(result).count("failed") == 8


# --- the table ----------------------------------------------------------------------------------


def test_every_row_of_the_table_is_tried() -> None:
    tried = set(re.findall(r"claims\(\"([^\"]+)\"\)", Path(__file__).read_text()))
    assert tried == {row.name for row in CAPABILITIES}


def test_the_programs_run_where_they_were_told_to(run: Run, level: Level) -> None:
    assert run("print(1)").level == level
    killed = run(f"import os\nos.kill(os.getpid(), {signal.SIGTERM:d})\n")
    assert killed.status == "nonzero" and killed.exit_code == -signal.SIGTERM
