"""Rows of any data file that people have, a row in memory at a time, chosen by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from posttrain.core.data.tables import parquet_rows
from posttrain.core.errors import DataError
from posttrain.core.runtime.json_files import JsonRow, stream_json_lines

EXAMPLE = '{"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}'


def data_files(source: str, setting: str) -> list[Path]:
    """The file itself, or the data files of a folder in the order of their names."""
    path = Path(source).expanduser()
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.iterdir() if file.suffix.lower() in READERS)
    if not found:
        raise DataError(
            f"the folder {source} has no data file ({', '.join(READERS)}): correct {setting}, or "
            "add one"
        )
    return found


def data_rows(source: str, setting: str) -> Iterator[JsonRow]:
    """Rows of the file or folder `source`; raises `DataError` that names file and row."""
    for file in data_files(source, setting):
        read = READERS.get(file.suffix.lower())
        if read is None:
            raise DataError(
                f"{file} has an ending that says no format, expected one of {', '.join(READERS)}: "
                f"rename the file, or correct {setting}"
            )
        yield from read(file, setting)


def _json_lines(file: Path, setting: str) -> Iterator[JsonRow]:
    return stream_json_lines(file, setting, EXAMPLE)


def _parquet(file: Path, setting: str) -> Iterator[JsonRow]:
    return parquet_rows(file, None, setting)


READERS: dict[str, Callable[[Path, str], Iterator[JsonRow]]] = {
    ".jsonl": _json_lines,
    ".parquet": _parquet,
}
