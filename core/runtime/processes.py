"""Child processes that cannot outlive this one, and whether a process still runs."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path

from posttrain.core.runtime import process_guard as guard


def process_start(pid: int) -> str:
    """When the process began, in clock ticks since boot; empty if it is gone or cannot be
    determined.

    A zombie counts as gone. Elsewhere than on Linux it is empty for every process.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


@dataclass(frozen=True, slots=True)
class Owner:
    """A process as a file's name or a tag can hold it.

    `boot` and `namespace` say in which kernel and which container its number means something: two
    containers may share a home, a host name and their process ids. Both are empty elsewhere than
    on Linux.
    """

    host: str
    pid: int
    start: str
    boot: str
    namespace: str

    @classmethod
    def this(cls) -> Owner:
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")[:16]
            namespace = os.readlink("/proc/self/ns/pid").strip("pid:[]")
        except OSError:
            boot = namespace = ""
        return cls(socket.gethostname(), os.getpid(), process_start(os.getpid()), boot, namespace)

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """None where `text` is not what `str` gives."""
        parts = text.split("@")
        if len(parts) != len(fields(cls)) or not parts[1].isdecimal():
            return None
        return cls(parts[0], int(parts[1]), *parts[2:])

    def __str__(self) -> str:
        return f"{self.host}@{self.pid}@{self.start}@{self.boot}@{self.namespace}"

    def is_visible(self) -> bool:
        """Whether this process can look that one up by its number."""
        here = Owner.this()
        if (self.boot, self.namespace) != (here.boot, here.namespace):
            return False
        try:  # /proc may be of another namespace than this process
            return os.readlink("/proc/self") == str(here.pid)
        except OSError:
            return here.boot == ""


def owner() -> str:
    """This process, in a form that fits a file's name."""
    return str(Owner.this())


def is_left_behind(reported: str, lock: Path | None = None) -> bool:
    """Whether the process `reported`, as `owner` gives it, is known to have ended.

    One of this container is looked up by its number. Of another container of this machine, and of
    this machine before it was started again, the lock file `lock` tells, which `hold` took in that
    process and the kernel let go with it. Nothing is known of any other process, so it counts as
    running.
    """
    process = Owner.parse(reported)
    if process is None:
        return False
    if process.is_visible():
        return process_start(process.pid) != process.start
    here = Owner.this()
    same_machine = bool(here.boot) and (process.boot == here.boot or process.host == here.host)
    return same_machine and lock is not None and is_free(lock)


HOLD_TRIES = 50


def hold(path: Path) -> int | None:
    """A descriptor that holds the lock file `path` for as long as this process has it open.

    None where it cannot be locked: then other containers count its holder as running.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        return None
    for _ in range(HOLD_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # `is_free` of another process takes it for a moment
            time.sleep(0.02)
        except OSError:
            break
        else:
            return descriptor
    os.close(descriptor)
    return None


def is_free(path: Path) -> bool:
    """Whether the lock file is there and nobody holds it; False where that cannot be known."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def life_name(reported: str) -> str:
    """The name of the file that the process `reported` holds locked for life."""
    return f".alive-{reported}"


_lives: dict[tuple[int, Path], Path | None] = {}


def life(folder: Path) -> Path | None:
    """The file in `folder` that this process holds locked until it ends; None if it cannot.

    It is made at the first call and removed at a normal exit.
    """
    key = (os.getpid(), folder)
    if key not in _lives:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        path = folder / life_name(owner())
        _lives[key] = path if hold(path) is not None else None
        if _lives[key] is not None:
            atexit.register(path.unlink, missing_ok=True)
    return _lives[key]


LOG_TAIL_LINES = 15


class ServerProcess:
    """A running server. It ends with this process, whatever way this process ends."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.log = log
        with log.open("wb") as output:
            self._guard = subprocess.Popen(
                [sys.executable, guard.__file__, *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,  # Ctrl-C in a terminal is for the run, not for its servers
            )

    @property
    def pid(self) -> int:
        """Process id of the guard, the parent of the server."""
        return self._guard.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; 128 + N after signal N."""
        return self._guard.poll()

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        try:
            with self.log.open(encoding="utf-8", errors="replace") as file:
                return "".join(deque(file, maxlen=lines)).rstrip()
        except OSError as error:
            return f"(its log cannot be read: {error})"

    def begin_stop(self) -> None:
        if self._guard.stdin is not None and not self._guard.stdin.closed:
            self._guard.stdin.close()

    def stop(self) -> None:
        self.begin_stop()
        try:
            self._guard.wait(2 * guard.GRACE_S + 5)
        except subprocess.TimeoutExpired:
            self._guard.kill()  # the server dies with its guard
            self._guard.wait()


def free_ports(count: int) -> list[int]:
    """Distinct ports of the loopback address that nobody listens on now."""
    with ExitStack() as stack:
        ports = []
        for _ in range(count):
            listener = stack.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            ports.append(int(listener.getsockname()[1]))
        return ports
