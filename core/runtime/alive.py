"""Whether a process that left something behind still runs."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def process_start(pid: int) -> str:
    """When the process began, in clock ticks since boot; empty if it is gone or cannot be told.

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


def is_left_behind(told: str) -> bool:
    """Whether `told`, as `owner` gives it, is a process of this machine that has ended.

    Nothing is known of a process of another machine, so it counts as running.
    """
    machine, number, start = told.split("@")
    return machine == socket.gethostname() and process_start(int(number)) != start
