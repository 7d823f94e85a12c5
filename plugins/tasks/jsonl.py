"""Your own problems from a JSON Lines file: one object per line with a prompt and an answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from posttrain.core.data.json_lines import JsonRow, stream_json_lines
from posttrain.core.data.row_task import RowConfig, RowTask
from posttrain.core.hooks import hookimpl


class JsonlConfig(RowConfig):
    """Settings of `jsonl`. Paths are relative to the working directory."""

    path: Path = Field(description="JSON Lines file, UTF-8, one object per line")
    held_out_path: Path | None = Field(
        default=None, description="the held-out problems; null = part of `path`, by content"
    )


class JsonlTask(RowTask[JsonlConfig]):
    """Problems of a file. Formula: key = the prompt without extra white space.

    Held out are the problems of `held_out_path`, or without one those with sha256(key) mod 1000 <
    held_out_permille. The file is read a line at a time, and a wrong line is told by its number.
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
        return stream_json_lines(path, setting, example)

    def files(self) -> list[Path]:
        """The one file, or both."""
        return [p.expanduser() for p in (self.config.path, self.config.held_out_path) if p]


@hookimpl
def posttrain_register() -> list[type[JsonlTask]]:
    """Offer this plugin."""
    return [JsonlTask]
