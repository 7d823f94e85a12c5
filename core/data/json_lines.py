"""JSON Lines files: one object per line, with errors that name file, line and what was expected."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from posttrain.core.errors import DataError


@dataclass(frozen=True, slots=True)
class JsonRow:
    """One line: `where` is `file:line`, for messages; `values` are the object's fields."""

    where: str
    values: dict[str, object]


def read_json_lines(path: Path, setting: str, example: str) -> list[JsonRow]:
    """Every object of the file, blank lines left out; raises `DataError` for anything else."""
    return list(stream_json_lines(path, setting, example))


def stream_json_lines(path: Path, setting: str, example: str) -> Iterator[JsonRow]:
    """The same, a line in memory at a time."""
    found = False
    try:
        # Only "\n" ends a line: JSON strings may hold U+2028 and other line breaks of Unicode.
        with path.expanduser().open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                text = _text(line, path, number)
                if text.strip():
                    found = True
                    yield _row(text, f"{path}:{number}", example)
    except OSError as error:
        raise DataError(
            f"cannot read {path} ({error.strerror}), expected a JSON Lines file: correct "
            f"{setting}; relative paths start at {Path.cwd()}"
        ) from error
    if not found:
        raise DataError(f"{path} has no rows, expected at least one line such as {example}")


def _text(line: bytes, path: Path, number: int) -> str:
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 (line {number}, byte {error.start}): save the file as UTF-8"
        ) from error


def _row(line: str, where: str, example: str) -> JsonRow:
    try:
        value = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON ({error}): correct this line") from error
    if not isinstance(value, dict):
        raise DataError(
            f"{where} holds {line.strip()[:40]!r}, expected a JSON object such as {example}"
        )
    return JsonRow(where, value)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
