"""The trainer's end of the fork server: it starts workers and knows their jobs and deadlines."""

from __future__ import annotations

import json
import math
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO, Any

from posttrain.core.errors import RunError
from posttrain.core.rewards.protocol import (
    BadFrame,
    Closed,
    Frames,
    Job,
    PoolSetup,
    framed,
    message,
    parse,
    read_available,
    read_score,
    send_all,
)
from posttrain.core.types import Score

START_LIMIT_S = 180.0
"""Seconds to build the rewards, or to take up work: neither is part of a sample's own limit."""
EXIT_LIMIT_S = 2.0


class WorkerHandle:
    """A worker process. Jobs are scored in the order they were given."""

    def __init__(self, number: int, sock: socket.socket, limits: Sequence[float]) -> None:
        self.number = number
        self.sock = sock
        self.jobs: deque[Job] = deque()
        self.pid: int | None = None  # known once it has built its rewards
        self.fault = ""
        self._limits = limits
        self._frames = Frames()
        self._since = time.monotonic()
        self.has_begun = False  # whether it has taken up the jobs it holds
        self.is_closing = False  # whether it is to be killed, and only its end is waited for

    @property
    def wants_work(self) -> bool:
        return self.pid is not None and not self.jobs and not self.is_closing

    def begin_closing(self, fault: str) -> None:
        """Wait no longer for anything but its end; `fault` says why, if that is known."""
        self.is_closing, self.fault, self._since = True, fault, time.monotonic()

    def give(self, jobs: Sequence[Job]) -> None:
        self.jobs.extend(jobs)
        self._since, self.has_begun = time.monotonic(), False
        send_all(self.sock, framed(pickle.dumps(list(jobs))))

    def limit(self) -> float:
        return self._limits[self.jobs[0].reward]

    def deadline(self) -> float:
        """When something must have been heard of it; infinity while it is idle."""
        if self.is_closing:
            return self._since + EXIT_LIMIT_S
        if self.pid is None or (self.jobs and not self.has_begun):
            return self._since + START_LIMIT_S
        return self._since + self.limit() if self.jobs else math.inf

    def read(self) -> tuple[list[tuple[int, Score]], bool]:
        """Scores that arrived, by job number, and whether it still has its connection."""
        payloads, is_open = read_available(self.sock, self._frames)
        try:
            taken = [self._take(parse(payload)) for payload in payloads]
        except (ValueError, KeyError, TypeError) as error:
            raise BadFrame("not what a worker writes") from error
        return [score for score in taken if score is not None], is_open

    def _take(self, fields: dict[str, Any]) -> tuple[int, Score] | None:  # Any: JSON
        """One message: it is up, it begins, or it has scored the first of its jobs."""
        if "failed" in fields:
            raise RunError(
                "the reward pool could not start a worker: building its rewards failed with "
                f"{fields['failed']}; fix the reward or its settings"
            )
        if "up" in fields:
            self.pid = int(fields["up"])
            return None
        if "begin" in fields:
            self.has_begun = True
            self._now_since(float(fields["begin"]))
            return None
        if not self.jobs or self.jobs[0].number != fields["job"]:
            raise BadFrame("a score for another sample")
        self._now_since(float(fields["at"]))
        return self.jobs.popleft().number, read_score(fields["score"])

    def _now_since(self, moment: float) -> None:
        """The next sample's scoring began at `moment`, by a clock that all processes share."""
        self._since = min(time.monotonic(), max(self._since, moment))


def ending(code: int) -> str:
    """How a process ended, for people."""
    if code >= 0:
        return f"its process ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    guess = ", perhaps for want of memory" if name == "SIGKILL" else ""
    return f"its process was killed by {name}{guess}"


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
        """How workers ended, as far as known by now."""
        try:
            payloads, is_open = read_available(self.control, self._frames)
            found = [parse(payload) for payload in payloads]
        except BadFrame as error:
            raise ServerLost from error
        for fields in found:
            if "failed" in fields:
                raise RunError(
                    f"the reward pool did not start: importing a reward failed with "
                    f"{fields['failed']}; fix its module"
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
