"""One background thread that does the slow writes, in order, and never loses an error.

Callers hand over a job and go on. A job that failed raises `RunError` at the next call or at
`flush`, whichever comes first. All jobs run on one thread, so the store never sees two writers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from requests.exceptions import ChunkedEncodingError

from posttrain.core.errors import RunError

T = TypeVar("T")
MAX_WAITING = 1000
"""Jobs that may wait; beyond that `submit` waits too, so memory stays bounded."""


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def reason(error: BaseException) -> str:
    """What is wrong, in the database's own words where one is behind it: users read no SQL."""
    # `orig` is SQLAlchemy's name for the driver's error.
    found = (getattr(cause, "orig", None) for cause in _causes(error))
    return str(next((driver for driver in found if driver is not None), error))


def cut_off(error: BaseException) -> bool:
    """Whether a server ended in the middle of its answer: MLflow repeats every other request."""
    return any(isinstance(cause, ChunkedEncodingError) for cause in _causes(error))


def once_more_if_cut_off(job: Callable[[], T]) -> T:
    """What `job` gives. It is asked again when the first answer was cut off."""
    try:
        return job()
    except Exception as error:
        if not cut_off(error):
            raise
    return job()


class Writer:
    """Runs jobs one after another in the background. `where` is named in errors.

    Jobs still waiting at a normal exit of the interpreter are run; a killed process loses them.
    """

    def __init__(self, where: str, max_waiting: int = MAX_WAITING) -> None:
        self.where = where
        self.failed = False
        self._max_waiting = max_waiting
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="posttrain-tracking")
        self._waiting: deque[tuple[str, Future[object]]] = deque()
        self._lock = threading.Lock()

    def submit(self, what: str, job: Callable[[], object]) -> None:
        """Queue `job`, named `what` in an error; then raise an earlier job's error, if any.

        The job is queued even then: a failed write must not take later measurements with it. It
        leaves the same when it runs twice, as it does when a server's answer is cut off.
        """
        with self._lock:
            earlier = self._untold()
            self._waiting.append((what, self._pool.submit(once_more_if_cut_off, job)))
            oldest = self._waiting[0][1] if len(self._waiting) > self._max_waiting else None
        if oldest is not None:
            oldest.exception()  # waits; a later call tells of the error itself
        if earlier is not None:
            raise earlier

    def call(self, what: str, job: Callable[[], T]) -> T:
        """Run `job` after everything queued before it and return its result."""
        future = self._pool.submit(job)
        error = future.exception()
        if error is not None:
            self.failed = True
            raise self._explained(what, error)
        return future.result()

    def check(self) -> None:
        with self._lock:
            error = self._untold()
        if error is not None:
            raise error

    def _untold(self) -> RunError | None:
        """The first error among the jobs done since the last call, with the count of the others."""
        failed: list[tuple[str, BaseException]] = []
        while self._waiting and self._waiting[0][1].done():
            what, future = self._waiting.popleft()
            error = future.exception()
            if error is not None:
                failed.append((what, error))
        if not failed:
            return None
        self.failed = True
        what, error = failed[0]
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        return self._explained(what + more, error)

    def drain(self) -> None:
        with self._lock:
            waiting = [future for _, future in self._waiting]
        for future in waiting:
            future.exception()

    def flush(self) -> None:
        """Wait until every job queued so far has run; raise the first error among them."""
        self.drain()
        self.check()

    def close(self) -> None:
        """Run what is queued and end the thread; `submit` and `call` raise `RuntimeError` then."""
        self._pool.shutdown(wait=True)

    def _explained(self, what: str, error: BaseException) -> RunError:
        wrapped = RunError(
            f"could not record {what} in MLflow at {self.where}: {reason(error)}; check that it "
            "can be reached and that its disk has room, then run the same command again"
        )
        wrapped.__cause__ = error
        return wrapped
