"""The background writer to MLflow, and the spool on disk that it fills while MLflow is away.

Callers hand over an operation, which is plain data, and go on. One thread sends them in order. An
operation that the server refuses raises `RunError` at the next call or at `flush`, whichever comes
first. When the server cannot be reached, all operations go to the spool in the run's folder, and
nothing raises or waits. The spool is sent in order when the server is back: by the same process, or
by the next command (`send_waiting` in `outage`).
"""

from __future__ import annotations

import atexit
import re
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from requests import exceptions as http
from sqlalchemy.exc import InterfaceError, OperationalError

from posttrain.core.errors import ResourceError, RunError, causes
from posttrain.core.redaction import redacted_tree
from posttrain.core.tracking.spool import REFUSED, Operation, Spool

MAX_WAITING = 1000
"""Operations that are kept in memory; what exceeds them goes to the spool."""
PROBE_S = 5.0
"""How often a server that is away is asked again."""
TRIES = 20
"""How often an operation that only gets server errors is sent while the server answers others."""


def reason(error: BaseException) -> str:
    """What is wrong, in the database's own words where one is behind it: users read no SQL."""
    # `orig` is SQLAlchemy's name for the driver's error.
    found = (getattr(cause, "orig", None) for cause in causes(error))
    return str(next((driver for driver in found if driver is not None), error))


_NO_ANSWER = (http.ConnectionError, http.Timeout, http.ChunkedEncodingError, ConnectionError)
_STORE_AWAY = ("EndpointConnectionError", "ConnectTimeoutError", "ReadTimeoutError")
"""Errors of artifact stores' own clients, which need not be installed."""
_SERVER_ERROR = re.compile(r"failed with error code (5\d\d|429) ")


def no_answer(error: BaseException) -> bool:
    """Whether the server could not be reached, or ended in the middle of its answer."""
    return any(
        isinstance(cause, _NO_ANSWER)
        or type(cause).__name__ in _STORE_AWAY
        or (isinstance(cause, OperationalError | InterfaceError) and _database_away(cause))
        for cause in causes(error)
    )


def _database_away(error: OperationalError | InterfaceError) -> bool:
    if isinstance(error.orig, sqlite3.Error):  # a full disk is an error too, and does not pass
        return "locked" in str(error.orig) or "busy" in str(error.orig)
    return True


def unreachable(error: BaseException) -> bool:
    """Whether the same request may succeed later: no answer, or an error of the server's own."""
    local = (cause for cause in causes(error) if isinstance(cause, OperationalError))
    if any(isinstance(cause.orig, sqlite3.Error) for cause in local):
        return no_answer(error)
    return no_answer(error) or any(_is_server_error(cause) for cause in causes(error))


def _is_server_error(error: BaseException) -> bool:
    if isinstance(error, http.RetryError):  # "too many 503 error responses"
        return True
    if isinstance(error, http.HTTPError) and error.response is not None:
        return error.response.status_code >= 500
    if getattr(error, "error_code", "") == "TEMPORARILY_UNAVAILABLE":
        return True
    return bool(_SERVER_ERROR.search(str(error)))


Send = Callable[[Operation, bool], str]
"""Sends an operation. True: it may have been sent before. Gives the id of what it made, or ""."""


@dataclass(frozen=True, slots=True)
class _Job:
    operation: Operation
    answer: Future[str] | None = None


WITH_SETTINGS = frozenset({"run", "tags", "text", "dataset"})
"""Kinds of operations with values from configs and environments."""


def _shown(operation: Operation) -> Operation:
    """The operation without credentials, as disk and MLflow get it."""
    return redacted_tree(operation) if operation["op"] in WITH_SETTINGS else operation


class Writer:
    """Sends operations one after another in the background. `where` is named in errors.

    `probe` says whether a server that was away answers again, and raises what a server says that
    takes nothing of this run: a refused login, a deleted experiment.
    """

    def __init__(
        self,
        where: str,
        send: Send,
        spool: Spool,
        probe: Callable[[], bool] = lambda: True,
        *,
        max_waiting: int = MAX_WAITING,
        probe_s: float = PROBE_S,
    ) -> None:
        self.where = where
        self.failed = False
        self.away = False
        self.refusal = ""
        self.spool = spool
        self._send, self._probe = send, probe
        self._max_waiting, self._probe_s = max_waiting, probe_s
        self._queue: deque[_Job] = deque()
        self._current: _Job | None = None  # taken from the queue, not from the spool
        self._failures: list[tuple[str, BaseException]] = []
        self._news: list[str] = []
        self._tries = 0
        self._reported = False
        self._closing = False
        self._broken: Exception | None = None
        self._changed = threading.Condition(threading.RLock())
        self._thread = threading.Thread(target=self._work, name="posttrain-tracking", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def submit(self, operation: Operation) -> None:
        """Queue an operation; then raise the error of an earlier one, if any.

        It is queued even then: a failed write must not take later measurements with it.
        """
        with self._changed:
            earlier = self._untold()
            self._put(_Job(_shown(operation)))
        if earlier is not None:
            raise earlier

    def call(self, operation: Operation) -> str:
        """The id of what the operation makes, after everything queued before it was sent.

        While MLflow is away it is the operation's `request`, which `real` resolves later.
        """
        job = _Job(_shown(operation), Future())
        with self._changed:
            self._put(job)
            if self.away:
                self._spill()
        assert job.answer is not None
        error = job.answer.exception()
        if error is not None:
            raise self._explained(operation["what"], error)
        return job.answer.result()

    def real(self, value: str) -> str:
        """An id of MLflow's in the place of a placeholder, once it is known."""
        return self.spool.ids.get(value, value)

    def news(self) -> list[str]:
        """Sentences for the user since the last call: MLflow is away, MLflow is back."""
        if not self._news:
            return []
        with self._changed:
            found, self._news = self._news, []
        return found

    def wait(self, patience_s: float) -> bool:
        """Wait until MLflow has everything; False when it is still away after `patience_s`.

        A server that answers gets everything, however long that takes.
        """
        self.drain()
        with self._changed:
            away_since = time.monotonic()
            while (self.away or self.spool.waiting) and self._thread.is_alive():
                if not self.away:
                    away_since = time.monotonic()
                elif time.monotonic() - away_since > patience_s:
                    return False
                self._changed.wait(0.2)
        return True

    def answers(self, operation: Operation) -> bool:
        """Whether MLflow answers now and has everything; `operation` asks it something."""
        request = self.call(operation)
        with self._changed:
            return request != operation["request"] and not self.away and not self.spool.waiting

    def check(self) -> None:
        with self._changed:
            error = self._untold()
        if error is not None:
            raise error

    def drain(self) -> None:
        """Wait until everything queued so far is in MLflow, or on disk while that is away."""
        with self._changed:
            if self.away:
                self._spill()
            while (self._queue or self._current) and self._thread.is_alive():
                self._changed.wait(1.0)

    def flush(self) -> None:
        """`drain`, then raise the first error of an operation that was refused."""
        self.drain()
        self.check()

    def close(self) -> int:
        """Send what waits and end the thread; returns how many operations are left in the spool.

        They are left when MLflow is away.
        """
        atexit.unregister(self.close)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        left = self.spool.waiting
        self.spool.release(last=True)
        return left

    def _put(self, job: _Job) -> None:
        if self._closing:
            raise RuntimeError("the writer is closed")
        if self._broken is not None:
            raise self._explained(job.operation["what"], self._broken)
        self._queue.append(job)
        if len(self._queue) > self._max_waiting:
            self._spill()
        self._changed.notify_all()

    def _spill(self) -> None:
        """Move everything in memory to the spool, what is being sent first."""
        jobs = [self._current] if self._current else []
        jobs += self._queue
        self._queue.clear()
        self._current = None
        if not jobs:
            return
        try:
            self.spool.append(job.operation for job in jobs)
        except (OSError, ResourceError) as error:
            self._failures += [(job.operation["what"], error) for job in jobs]
            for job in jobs:
                if job.answer is not None:
                    job.answer.set_exception(error)
        for job in jobs:
            if job.answer is not None and not job.answer.done():
                job.answer.set_result(job.operation.get("request", ""))
        self._changed.notify_all()

    def _work(self) -> None:
        try:
            self._send_all()
        except Exception as error:  # a spool that cannot be read: nobody may wait for this thread
            with self._changed:
                self._broken = error
                for job in self._queue:
                    if job.answer is not None:
                        job.answer.set_exception(error)
                self._queue.clear()
                self._current = None
                self._failures.append(("what waits", error))
                self._changed.notify_all()

    def _send_all(self) -> None:
        while True:
            with self._changed:
                if not self._has_work():
                    return
                if not self.away:
                    job = self._take()
            if self.away:
                self.away = not self._answers()
            else:
                self._attempt(job)

    def _has_work(self) -> bool:
        """Wait for something to do; False when the thread is to end. Called with the lock."""
        due = time.monotonic() + self._probe_s
        while True:
            if self.away:
                self._spill()
                if self._closing:
                    return False
                now = time.monotonic()
                if now >= due:
                    return True
                self._changed.wait(due - now)
            elif self._queue or self.spool.waiting:
                return True
            elif self._closing:
                return False
            else:
                self._emptied()
                self._changed.wait()

    def _emptied(self) -> None:
        if self._reported:
            self._reported, self.refusal = False, ""
            self._news.append(
                f"MLflow at {self.where} answers again: everything that waited was sent"
            )
        if self.spool.in_use:
            self.spool.release()

    def _take(self) -> _Job:
        """The oldest operation: what is in the spool is older than what is in the queue."""
        if self.spool.waiting:
            return _Job(self.spool.first())
        self._current = self._queue.popleft()
        return self._current

    def _answers(self) -> bool:
        try:
            return self._probe()
        except Exception as error:  # whatever it is, this thread goes on: the run never waits
            with self._changed:
                self._refuses(error)
            return False

    def _refuses(self, error: BaseException) -> bool:
        """Whether the server answers and takes nothing; reported once for each reason."""
        if unreachable(error):
            return False
        if self.refusal != reason(error):
            self.refusal = reason(error)
            self._reported = True
            self._news.append(
                f"MLflow at {self.where} refuses what this run records ({self.refusal}): the run "
                f"goes on, and it waits in {self.spool.folder} until MLflow takes it"
            )
        return True

    def _takes_nothing(self) -> bool:
        try:
            self._probe()
        except Exception as error:  # as above
            return self._refuses(error)
        return False

    def _attempt(self, job: _Job) -> None:
        operation, again = job.operation, self._current is None
        try:
            made = self._send(self.spool.resolved(operation), again)
        except BaseException as error:  # who waits for the answer gets it
            with self._changed:
                self._not_sent(job, error)
            return
        with self._changed:
            self._tries = 0
            self._sent(job, made)

    def _sent(self, job: _Job, made: str) -> None:
        if self._current is None:  # it was in the spool, or came there while it was sent
            if self.spool.waiting:
                self.spool.done(job.operation, made)
        else:
            self.spool.drop_file(job.operation)
            self._current = None
        if job.answer is not None and not job.answer.done():
            job.answer.set_result(made)
        self._changed.notify_all()

    def _not_sent(self, job: _Job, error: BaseException) -> None:
        if not unreachable(error) and self._takes_nothing():
            self.away = True
            self._spill()
            return
        if unreachable(error):
            self._tries += not no_answer(error)
            if self._tries < TRIES:
                self._go_away(error)
                return
            self._tries = 0
            self._news.append(
                f"MLflow at {self.where} does not take {job.operation['what']} "
                f"({reason(error)}): it is kept in {self.spool.folder / REFUSED}"
            )
            self._spill()
            self.spool.refuse(job.operation, reason(error))
        elif job.answer is None or job.answer.done():
            self._failures.append((job.operation["what"], error))
        else:
            self.failed = True
            job.answer.set_exception(error)
        self._sent(job, "")

    def _go_away(self, error: BaseException) -> None:
        self.away = True
        self._spill()
        if not self._reported:
            self._reported = True
            self._news.append(
                f"MLflow at {self.where} cannot be reached: the run goes on, and what it records "
                f"waits in {self.spool.folder} until MLflow is back"
            )

    def _untold(self) -> RunError | None:
        """The first error since the last call, with the count of the others."""
        if not self._failures:
            return None
        failed, self._failures = self._failures, []
        self.failed = True
        what, error = failed[0]
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        return self._explained(what + more, error)

    def _explained(self, what: str, error: BaseException) -> RunError:
        wrapped = RunError(
            f"could not record {what} in MLflow at {self.where}: {reason(error)}; check that it "
            "can be reached and that its disk has room, then run the same command again"
        )
        wrapped.__cause__ = error
        return wrapped
