"""Your own problems from Parquet files: one row per problem with a prompt and an answer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from posttrain.core.data.row_task import RowConfig, RowTask
from posttrain.core.data.tables import expand, parquet_rows
from posttrain.core.runtime.json_files import JsonRow


class ParquetConfig(RowConfig):
    """Settings of `parquet`. Paths are relative to the working directory."""

    path: Path = Field(description="Parquet file, or a folder of *.parquet, read in name order")
    held_out_path: Path | None = Field(
        default=None, description="the held-out problems; null = part of `path`, by content"
    )
    limit: int | None = Field(
        default=None, ge=2, description="rows of `path` to read at most; null = all"
    )


class ParquetTask(RowTask[ParquetConfig]):
    """Problems of Parquet files, verl's among them. Formula: key = the prompt, in Unicode's NFC.

    Rows are streamed, a row group at a time and without the columns that no field names. Held out
    are the problems of `held_out_path`, or without one those with sha256(key) mod 1000 <
    held_out_permille.
    Source: own; the format is that of https://parquet.apache.org, read through pyarrow.
    """

    name = "parquet"
    Config = ParquetConfig

    def read(self) -> tuple[Iterator[JsonRow], Iterator[JsonRow] | None]:
        """The rows of both places."""
        held_out = self.config.held_out_path
        apart = None if held_out is None else self._rows(held_out, "task.held_out_path")
        return itertools.islice(self._rows(self.config.path, "task.path"), self.config.limit), apart

    def _rows(self, path: Path, setting: str) -> Iterator[JsonRow]:
        """The rows with the columns that are used; all of them if one that is needed is missing."""
        first = next(parquet_rows(path, None, setting))
        return parquet_rows(path, self.config.columns(first.values) or None, setting)

    def files(self) -> list[Path]:
        """Every file of both places."""
        config = self.config
        files = expand(config.path, ".parquet", "task.path")
        if config.held_out_path is not None:
            files += expand(config.held_out_path, ".parquet", "task.held_out_path")
        return files
