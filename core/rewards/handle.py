"""What the pool knows of one worker: its connection, the jobs it holds, and its next deadline."""

from __future__ import annotations

import math
import pickle
import signal
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from posttrain.core.errors import RunError
from posttrain.core.rewards.protocol import (
    BadFrame,
    Frames,
    Job,
    framed,
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
                f"{fields['failed']}; mend the reward or its settings"
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
