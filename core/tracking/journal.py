"""The write-ahead record of metrics: a file in the home for each stage.

Each line is `{"step": int, "time_ms": int, "metrics": {name: float}}`. The operating system has it
before `append` returns, so a killed process loses nothing that it measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from posttrain.core.errors import ResourceError, RunError
from posttrain.core.runtime.files import of_shape, write_text


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
