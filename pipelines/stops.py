"""Stop signals: whatever a library makes of the interrupt, what follows one is a stop."""

from __future__ import annotations


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
