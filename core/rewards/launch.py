"""The trainer's end of the fork server: starts it, asks for workers, hears how they ended."""

from __future__ import annotations

import json
import os
import pickle
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import IO

from posttrain.core.errors import RunError
from posttrain.core.rewards.handle import START_LIMIT_S
from posttrain.core.rewards.protocol import (
    BadFrame,
    Closed,
    Frames,
    framed,
    message,
    parse,
    read_available,
    send_all,
)
from posttrain.core.rewards.spec import PoolSetup

_CLOSE_LIMIT_S = 10.0
_COMMAND = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from posttrain.core.rewards.server import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


class ServerLost(Exception):
    """The fork server is gone."""


class ForkServerProcess:
    """A running fork server. Starting returns at once; `wait_ready` waits for its imports."""

    def __init__(self, setup: PoolSetup) -> None:
        self.control, theirs = socket.socketpair()
        self.control.setblocking(False)
        self._frames = Frames()
        self._log: IO[bytes] = tempfile.TemporaryFile()
        self.ready = False
        path = json.dumps([entry or os.getcwd() for entry in sys.path])
        number = str(theirs.fileno())
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", _COMMAND, path, number, str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                # Threads do not survive a fork, and a worker scores one sample at a time.
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # a Ctrl-C in the terminal is the trainer's to handle
            )
        self._send(framed(pickle.dumps(setup)))

    def wait_ready(self, check: Callable[[], None]) -> None:
        """Return once workers can be asked for; `RunError` when the rewards cannot be imported."""
        deadline = time.monotonic() + START_LIMIT_S
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        while not self.ready:
            check()
            try:
                self.messages()
            except ServerLost:
                raise RunError(f"the reward pool did not start: {self.last_words()}") from None
            if not self.ready:
                if time.monotonic() > deadline:
                    raise RunError(
                        f"the reward pool did not start within {START_LIMIT_S:.0f} s: importing "
                        "the rewards' modules hangs or takes longer than that"
                    )
                poll.poll(200)

    def spawn(self, number: int) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self.control, [message(spawn=number)], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise ServerLost from error
        ours.setblocking(False)
        return ours

    def kill(self, number: int) -> None:
        self._send(message(kill=number))

    def messages(self) -> list[dict[str, object]]:
        """How workers ended, as far as told by now."""
        try:
            payloads, is_open = read_available(self.control, self._frames)
            found = [parse(payload) for payload in payloads]
        except BadFrame as error:
            raise ServerLost from error
        for fields in found:
            if "failed" in fields:
                raise RunError(
                    f"the reward pool did not start: importing a reward failed with "
                    f"{fields['failed']}; mend its module"
                )
            self.ready |= "ready" in fields
        if not is_open and not found:
            raise ServerLost
        return found

    def _send(self, data: bytes) -> None:
        try:
            send_all(self.control, data)
        except Closed:
            raise ServerLost from None

    def last_words(self) -> str:
        try:
            code: object = self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            code = "none yet"
        self._log.seek(0)
        lines = self._log.read()[-4000:].decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"its process ended (exit code {code}) without a word"

    def close(self) -> None:
        """End the server, which kills every worker first; may be called twice."""
        self.control.close()
        try:
            self.process.wait(timeout=_CLOSE_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()
