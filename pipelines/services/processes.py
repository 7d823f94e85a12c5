"""Processes that outlive the command that starts them, found again by a record on disk."""

from __future__ import annotations

import json
import os
import pwd
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from posttrain.core.runtime.files import write_text

MARK = "POSTTRAIN_SERVICES"
"""Every process of the services, and what it starts, has this variable: the services' folder."""
SAME_START_S = 2.0


@dataclass(frozen=True, slots=True)
class Launch:
    """How a service is started; `environment` is all it gets, `user` whom it runs as."""

    service: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    record: Path
    user: str | None = None


def as_user(user: str | None) -> dict[str, Any]:
    """What `subprocess` needs to run a program as `user`."""
    if user is None:
        return {}
    return {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}


def _default_signals() -> None:
    """In the child: started with `&` by a script, it would never see an interrupt."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def start(launch: Launch, folder: Path) -> psutil.Process:
    """Start and record it, in a session of its own: no Ctrl-C of a terminal reaches it."""
    with launch.log.open("w") as log:
        os.chmod(launch.log, 0o600)
        process = subprocess.Popen(
            list(launch.command),
            env={"PYTHONUNBUFFERED": "1", **launch.environment, MARK: str(folder)},
            cwd=launch.record.parent,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_default_signals,
            **as_user(launch.user),
        )
    found = psutil.Process(process.pid)
    write_text(launch.record, json.dumps({"pid": process.pid, "started": found.create_time()}))
    return found


def find(record: Path) -> psutil.Process | None:
    """The recorded process if it still runs; its number may have gone to another one since."""
    try:
        kept = json.loads(record.read_text())
        process = psutil.Process(int(kept["pid"]))
        same = abs(process.create_time() - float(kept["started"])) < SAME_START_S
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except (FileNotFoundError, ValueError, KeyError, TypeError, psutil.NoSuchProcess):
        return None


def marked(folder: Path) -> list[psutil.Process]:
    """Every process that belongs to the services in `folder`, however it was orphaned."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(folder):
                found.append(process)
        except psutil.Error:
            continue  # ended meanwhile, or another user's
    return found


def signal_all(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def wait_gone(processes: Sequence[psutil.Process], seconds: float) -> list[psutil.Process]:
    deadline = time.monotonic() + seconds
    alive = list(processes)
    while alive and time.monotonic() < deadline:
        _, alive = psutil.wait_procs(alive, timeout=0.1)
        alive = [process for process in alive if _runs(process)]
    return alive


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def last_line(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        return "nothing"
    return lines[-1].strip() if lines else "nothing"
