"""Stop signals: whatever a library makes of the interrupt, what follows one is a stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
