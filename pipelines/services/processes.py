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

from posttrain.core.errors import ResourceError
from posttrain.core.runtime.files import write_text
from posttrain.core.runtime.processes import Owner, hold, is_free, owner

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
    lock = _lock_of(launch.record)
    held = hold(lock)
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
            pass_fds=() if held is None else (held,),  # the service holds it until it ends
            **as_user(launch.user),
        )
    if held is not None:
        os.close(held)
    found = psutil.Process(process.pid)
    kept = {"pid": process.pid, "started": found.create_time(), "by": owner()}
    write_text(launch.record, json.dumps(kept))
    return found


def _lock_of(record: Path) -> Path:
    return record.with_suffix(".lock")


def find(record: Path) -> psutil.Process | None:
    """The recorded process if it still runs; its number may have gone to another one since.

    Raises `ResourceError` where it runs in another container, which cannot be looked into, and for
    a record of which nothing can be made while somebody may hold its lock.
    """
    try:
        kept = json.loads(record.read_text("utf-8"))
        pid, started = int(kept["pid"]), float(kept["started"])
        by = Owner.parse(kept["by"]) if "by" in kept else Owner.this()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        if is_free(_lock_of(record)):
            return None
        raise ResourceError(
            f"{record} is not the record of a process ({error}): end {record.stem} of this home if "
            "it still runs, then remove the record"
        ) from error
    if by is None or not by.is_visible():
        if is_free(_lock_of(record)):
            return None
        raise ResourceError(
            f"{record.stem} of this home was started in another container or on another machine "
            f"({kept['by']}) and may run there: use `posttrain services` there, or, if that is "
            f"gone for good, remove {record}"
        )
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - started) < SAME_START_S
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
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
