"""Child processes that cannot outlive this one, and whether a process still runs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
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


def owner() -> str:
    """This process, in a form that fits a file's name: machine, number and start."""
    pid = os.getpid()
    return f"{socket.gethostname()}@{pid}@{process_start(pid)}"


def is_left_behind(reported: str) -> bool:
    """Whether `reported`, as `owner` gives it, is a process of this machine that has ended.

    Nothing is known of a process of another machine, so it counts as running.
    """
    machine, number, start = reported.split("@")
    return machine == socket.gethostname() and process_start(int(number)) != start


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
