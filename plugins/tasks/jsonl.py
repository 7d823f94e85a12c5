"""Your own problems from JSON Lines files: one object per line with a prompt and an answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from posttrain.core.data.row_task import RowConfig, RowTask
from posttrain.core.errors import DataError
from posttrain.core.runtime.json_files import JsonRow, stream_json_lines


class JsonlConfig(RowConfig):
    """Settings of `jsonl`. Paths are relative to the working directory."""

    path: Path = Field(
        description="JSON Lines file, UTF-8, one object per line, or a folder of them"
    )
    held_out_path: Path | None = Field(
        default=None, description="the held-out problems; null = part of `path`, by content"
    )


class JsonlTask(RowTask[JsonlConfig]):
    """Problems of a file or folder. Formula: key = the prompt, in Unicode's NFC.

    Held out are the problems of `held_out_path`, or without one those with sha256(key) mod 1000 <
    held_out_permille. The file is read a line at a time, and an error names the line by its number.
    Source: own; the format is that of https://jsonlines.org.
    """

    name = "jsonl"
    Config = JsonlConfig

    def read(self) -> tuple[Iterator[JsonRow], Iterator[JsonRow] | None]:
        """The rows of both files."""
        path, held_out = self.config.path, self.config.held_out_path
        apart = None if held_out is None else self._rows(held_out, "task.held_out_path")
        return self._rows(path, "task.path"), apart

    def _rows(self, path: Path, setting: str) -> Iterator[JsonRow]:
        example = f'{{"{self.config.prompt_field}": ..., "{self.config.answer_field}": ...}}'
        for part in files_at(path, setting):
            yield from stream_json_lines(part, setting, example)

    def files(self) -> list[Path]:
        """The files of both splits."""
        path, held_out = self.config.path, self.config.held_out_path
        apart = [] if held_out is None else files_at(held_out, "task.held_out_path")
        return [*files_at(path, "task.path"), *apart]


def files_at(path: Path, setting: str) -> list[Path]:
    """The file itself, or the `*.jsonl` of a folder by name; raises `DataError` without any."""
    path = path.expanduser()
    if not path.is_dir():
        return [path]
    found = sorted(path.glob("*.jsonl"))
    if not found:
        raise DataError(f"the folder {path} has no *.jsonl file: correct {setting}, or add one")
    return found
