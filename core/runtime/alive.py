"""Whether a process that left something behind still runs."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def process_start(pid: int) -> str:
    """When the process began, in clock ticks since boot; empty if it is gone or cannot be told.

    A zombie counts as gone. Linux only: elsewhere the result is empty for every process.
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


def is_left_behind(told: str) -> bool:
    """Whether `told`, of `owner`, is a process of this machine that runs no more.

    Of a process of another machine nothing is known, so it counts as running. A text that names no
    owner is from a version that wrote none, which did not share.
    """
    machine, _, process = told.partition("@")
    number, _, start = process.partition("@")
    if not number.isdigit():
        return True
    if machine != socket.gethostname():
        return False
    now = process_start(int(number))
    return now != start if start else not _exists(int(number))


def _exists(pid: int) -> bool:
    """Of a system that does not tell when a process began."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
