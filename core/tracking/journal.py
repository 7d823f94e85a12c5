"""The write-ahead record of metrics, and the background thread that writes to MLflow.

Callers hand over a job and go on. A job that failed raises `RunError` at the next call or at
`flush`, whichever comes first. All jobs run on one thread, so the store never sees two writers.

Each line is `{"step": int, "time_ms": int, "metrics": {name: float}}`. The operating system has it
before `append` returns, so a killed process loses nothing that it measured.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel
from requests.exceptions import ChunkedEncodingError

from posttrain.core.errors import ResourceError, RunError
from posttrain.core.runtime.files import of_shape, write_text

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


@dataclass(frozen=True, slots=True)
class JournalRow:
    """What was measured at one step; `time_ms` is Unix time in milliseconds."""

    step: int
    time_ms: int
    metrics: Mapping[str, float]

    def line(self) -> str:
        row = {"step": self.step, "time_ms": self.time_ms, "metrics": dict(self.metrics)}
        return json.dumps(row, separators=(",", ":")) + "\n"


def journal_path(folder: Path, stage: str, identity: str = "") -> Path:
    mark = f"-{identity[:16]}" if identity else ""
    return folder / f"metrics-{stage}{mark}.jsonl"


def read_journal(path: Path) -> list[JournalRow]:
    """All complete rows, oldest first; none if there is no file.

    The last line may be cut, by a kill. Raises `RunError` for any other line that is not a row.
    """
    if not path.exists():
        return []
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise _damaged(str(path), error.strerror or str(error)) from error
    return [_row(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]


class _Row(BaseModel):
    step: int
    time_ms: int
    metrics: dict[str, float]


def _row(line: bytes, where: str) -> JournalRow:
    try:
        row = of_shape(json.loads(line), _Row)
    except (ValueError, RecursionError) as error:
        raise _damaged(where, str(error)) from error
    return JournalRow(row["step"], row["time_ms"], row["metrics"])


def _damaged(where: str, why: str) -> RunError:
    return RunError(
        f"{where} is not what a run wrote of its metrics ({why}): restore the file, or run with "
        "--fresh to start the stage over"
    )


class Journal:
    """Appends rows to a file. Opening keeps its rows up to step `keep_through` (None = no row)."""

    def __init__(self, path: Path, keep_through: int | None = None) -> None:
        self.path = path
        self.kept: list[JournalRow] = []
        if keep_through is not None:
            self.kept = [row for row in read_journal(path) if row.step <= keep_through]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, "".join(row.line() for row in self.kept))
            self._stream = path.open("a")
        except OSError as error:
            raise ResourceError(
                f"cannot write the metric journal {path}: {error.strerror}; free some space or "
                "choose another --home"
            ) from error

    def append(self, row: JournalRow) -> None:
        try:
            self._stream.write(row.line())
            self._stream.flush()
        except OSError as error:
            raise ResourceError(
                f"cannot write the metric journal {self.path}: {error.strerror}; free some space"
            ) from error

    def close(self) -> None:
        self._stream.close()
