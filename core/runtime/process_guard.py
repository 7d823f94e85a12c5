"""Runs a server that cannot outlive its owner: `python guard.py COMMAND...`, standard library only.

Standard input is a pipe that the owner holds open; its end, however the owner ended, stops the
server and all its children. It is a program of its own as the kernel's parent-death signal follows
the *thread* that started a child, and a run starts servers from threads that end early.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

GRACE_S = 8.0
PR_SET_PDEATHSIG = 1


def _die_with_the_guard() -> None:
    """In the server, before it starts: be killed when the guard is (Linux; elsewhere nothing)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        pass  # all gone, or only zombies left


def _end_with(server: subprocess.Popen[bytes]) -> None:
    """Wait for the server, end what it left behind, and exit with its code."""
    code = server.wait()
    _signal_group(server.pid, signal.SIGKILL)
    os._exit(code if code >= 0 else 128 - code)


def main(command: list[str]) -> None:
    """Run `command` until it ends or standard input does."""
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # a group of its own, to be signalled whole
        preexec_fn=_die_with_the_guard,
    )
    threading.Thread(target=_end_with, args=(server,), daemon=True).start()
    while os.read(0, 4096):
        pass
    _signal_group(server.pid, signal.SIGTERM)
    time.sleep(GRACE_S)  # the other thread exits as soon as the server has
    _signal_group(server.pid, signal.SIGKILL)
    time.sleep(GRACE_S)


if __name__ == "__main__":
    main(sys.argv[1:])
