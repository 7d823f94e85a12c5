"""Runs a server that cannot outlive its owner: `python guard.py [--tree SECONDS] COMMAND...`.

Standard library only. Standard input is a pipe that the owner holds open; its end, however the
owner ended, stops the server and all its children: those of its process group, and with `--tree`
also those that left the group (Linux); SECONDS is the time they have to end themselves. It is a
program of its own as the kernel's parent-death signal follows the *thread* that started a child,
and a run starts servers from threads that end early.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import signal
import subprocess
import sys
import threading
import time

GRACE_S = 8.0
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def die_with_parent() -> None:
    """Be killed when the process that started this one is (Linux; elsewhere nothing)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        pass  # all gone, or only zombies left


def _end_with(server: subprocess.Popen[bytes], tree: bool) -> None:
    """Wait for the server, end what it left behind, and exit with its code."""
    code = _waited(server.pid) if tree else server.wait()
    _signal_group(server.pid, signal.SIGKILL)
    if tree:
        _end_orphans()
    os._exit(code if code >= 0 else 128 - code)


def _waited(server: int) -> int:
    """The server's exit code; on the way, what it left without a parent is reaped."""
    while True:
        pid, status = os.wait()
        if pid == server:
            return os.waitstatus_to_exitcode(status)


def _end_orphans() -> None:
    """Kill our children until there are none: whose parent is killed becomes our child."""
    while lists := glob.glob("/proc/self/task/*/children"):
        for path in lists:
            with open(path) as file:
                for pid in file.read().split():
                    with contextlib.suppress(PermissionError):
                        os.kill(int(pid), signal.SIGKILL)  # not reaped, so still that process
        try:
            os.wait()
        except ChildProcessError:
            return


def main(command: list[str], grace: float = GRACE_S, tree: bool = False) -> None:
    """Run `command` until it ends or standard input does."""
    if tree and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        close_fds=False,  # files that the owner passed on are for the server
        start_new_session=True,  # a group of its own, to be signalled whole
        preexec_fn=die_with_parent,
    )
    threading.Thread(target=_end_with, args=(server, tree), daemon=True).start()
    while os.read(0, 4096):
        pass
    _signal_group(server.pid, signal.SIGTERM)
    time.sleep(grace)  # the other thread exits as soon as the server has
    _signal_group(server.pid, signal.SIGKILL)
    time.sleep(GRACE_S)


if __name__ == "__main__":
    if sys.argv[1] == "--tree":
        main(sys.argv[3:], float(sys.argv[2]), tree=True)
    else:
        main(sys.argv[1:])
