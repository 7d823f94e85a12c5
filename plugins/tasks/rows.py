"""Your own problems from a file of any kind, a folder or a hub: verl's, TRL's or plain rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from posttrain.core.data.row_task import RowConfig, RowTask
from posttrain.core.data.rows import data_files, data_rows
from posttrain.core.runtime.json_files import JsonRow


class RowsConfig(RowConfig):
    """Settings of `rows`. Paths are relative to the working directory."""

    path: str = Field(
        min_length=1,
        description="JSON, JSON Lines, CSV, TSV, Parquet or Arrow file, a folder of them, or "
        "hub:owner/name[/subset][@revision][#split]",
    )
    held_out_path: str | None = Field(
        default=None, description="the held-out problems; null = part of `path`, by content"
    )
    limit: int | None = Field(
        default=None, ge=2, description="rows of `path` to read at most; null = all"
    )


class RowsTask(RowTask[RowsConfig]):
    """Problems of any data file. Formula: key = the prompt, in Unicode's NFC.

    The ending of a file's name says how it is read, its first row which `format` it has. Held out
    are the problems of `held_out_path`, or without one those with sha256(key) mod 1000 <
    held_out_permille. A verifier is chosen by `match`, in verl's files by `data_source`.
    Source: own; verl's format is that of its `examples/data_preprocess`, TRL's that of its page
    "Dataset formats and types".
    """

    name = "rows"
    Config = RowsConfig

    def read(self) -> tuple[Iterator[JsonRow], Iterator[JsonRow] | None]:
        """The rows of both places."""
        path, held_out = self.config.path, self.config.held_out_path
        apart = None if held_out is None else data_rows(held_out, "task.held_out_path")
        return itertools.islice(data_rows(path, "task.path"), self.config.limit), apart

    def files(self) -> list[Path]:
        """Every file of both places; none when one of them is a hub."""
        path, held_out = self.config.path, self.config.held_out_path
        found = [data_files(path, "task.path")]
        if held_out is not None:
            found.append(data_files(held_out, "task.held_out_path"))
        return [file for files in found for file in files] if all(found) else []

    def source(self) -> str:
        """The paths as given, or the data sets on the hub."""
        return ", ".join(p for p in (self.config.path, self.config.held_out_path) if p)
