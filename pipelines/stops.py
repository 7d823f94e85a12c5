"""Stop signals: whatever a library makes of the interrupt, what follows one is a stop."""

from __future__ import annotations

import os
import signal
from types import TracebackType
from typing import Self

STOPS = frozenset({signal.SIGINT, signal.SIGTERM})


class Stop(KeyboardInterrupt):
    """Raised at the next safe point after somebody asked the run to stop."""


def follows_a_stop(error: BaseException) -> bool:
    """Whether `error` is an interrupt, or was raised while one was handled.

    Prefect has a SIGTERM handler of its own while a flow runs, and an interrupt of either kind that
    strikes while a task run begins comes out as an error of Prefect's.
    """
    from prefect.exceptions import TerminationSignal

    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        found = waiting.pop()
        if found is None or id(found) in seen:
            continue
        if isinstance(found, KeyboardInterrupt | TerminationSignal):
            return True
        seen.add(id(found))
        waiting += [found.__cause__, found.__context__]
    return False


def never() -> bool:
    """What a run is told of stops where no signals are waited for."""
    return False


class ArrivedSignals:
    """Which signals came, told by the interpreter itself and not by a handler; in the main thread.

    A handler's exception can be lost: in a finalizer, as there are while modules are imported, or
    to a library that catches everything. While a flow runs Prefect's handler stands in for ours.
    """

    def __enter__(self) -> Self:
        self._read, self._write = os.pipe()
        for end in (self._read, self._write):
            os.set_blocking(end, False)
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.set_wakeup_fd(self._before)
        for end in (self._read, self._write):
            os.close(end)

    def stop_came(self) -> bool:
        """Whether one that asks to stop came since this was last asked."""
        try:
            return not STOPS.isdisjoint(os.read(self._read, 4096))
        except BlockingIOError:
            return False
