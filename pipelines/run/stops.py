"""How a run stops early: signals, and a watchdog for runs that hang.

Stages give a sign of life between pieces of work (`Pipeline.check`). When none has come for as long
as the config allows, the stacks are written into the home and the run fails.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Self

from posttrain.core.errors import RunError
from posttrain.core.redaction import errors_behind

STOPS = frozenset({signal.SIGINT, signal.SIGTERM})


class Stop(KeyboardInterrupt):
    """Raised at the next safe point after somebody asked the run to stop."""


def follows_a_stop(error: BaseException) -> bool:
    """Whether `error` is an interrupt, or was raised while one was handled.

    Prefect has a SIGTERM handler of its own while a flow runs, and an interrupt of either kind that
    strikes while a task run begins comes out as an error of Prefect's.
    """
    from prefect.exceptions import TerminationSignal

    stops = KeyboardInterrupt | TerminationSignal
    return any(isinstance(found, stops) for found in errors_behind(error))


def never() -> bool:
    """What a run knows of stops where no signals are waited for."""
    return False


@contextmanager
def noted_stops() -> Iterator[Callable[[], bool]]:
    """Tells whether a stop came since it was last asked; in the main thread.

    The interpreter itself notes the signal, and not a handler, whose exception can be lost: in a
    finalizer, as there are while modules are imported, or to a library that catches everything.
    While a flow runs Prefect's handler stands in for ours.
    """
    read, write = os.pipe()
    for end in (read, write):
        os.set_blocking(end, False)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def came() -> bool:
        try:
            return not STOPS.isdisjoint(os.read(read, 4096))
        except BlockingIOError:
            return False

    try:
        yield came
    finally:
        signal.set_wakeup_fd(before)
        os.close(read)
        os.close(write)


GRACE_S = 60.0
"""To end by itself once it was asked to; code that never returns to Python cannot."""
SIGNAL = signal.SIGUSR1


class Stalled(RunError):
    """No sign of life for too long."""


class Watchdog:
    """Watches one run from a thread of its own, between `with` and its end.

    Where the process is not the run's own (`owns_process`) it is never ended.
    """

    def __init__(self, limit_s: float, folder: Path, grace_s: float = GRACE_S) -> None:
        self.limit_s, self.folder, self.grace_s = limit_s, folder, grace_s
        self.owns_process = True
        self._last = time.monotonic()
        self._resting = 0
        self._over = threading.Event()
        self._message = ""

    def sign(self) -> None:
        """Something goes on. Costs nothing."""
        self._last = time.monotonic()

    @contextmanager
    def resting(self) -> Iterator[None]:
        """While a person or another process is waited for."""
        self._resting += 1
        try:
            yield
        finally:
            self.sign()
            self._resting -= 1

    def __enter__(self) -> Self:
        if self.limit_s and threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(SIGNAL, self._raise)
            self.sign()
            threading.Thread(target=self._watch, daemon=True, name="watchdog").start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if hasattr(self, "_previous"):
            signal.signal(SIGNAL, self._previous)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        raise Stalled(self._message)

    def _watch(self) -> None:
        while not self._over.wait(min(self.limit_s / 4, 5.0)):
            if not self._resting and time.monotonic() - self._last > self.limit_s:
                self._bite()
                return

    def _bite(self) -> None:
        """Write the stacks, interrupt the main thread, and end the process if that does not
        help.
        """
        path = self.folder / f"stacks-{time.strftime('%Y%m%d-%H%M%S')}.txt"
        with path.open("w") as stream:
            faulthandler.dump_traceback(stream, all_threads=True)
        self._message = (
            f"no sign of life for {self.limit_s / 60:g} min: what every thread was doing is in "
            f"{path}. If one piece of work may take that long, raise limits.stall_minutes; the "
            "same command continues the run"
        )
        signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)
        if self.owns_process and not self._over.wait(self.grace_s):
            print(f"error: {self._message}", file=sys.stderr, flush=True)
            os._exit(1)
