"""Problems of a data set on a hub: one row per problem with a prompt and an answer."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from posttrain.core.data.row_task import RowConfig, RowTask
from posttrain.core.data.tables import HubSource, hub_rows, resolve_revision
from posttrain.core.runtime.json_files import JsonRow

FIX = "download its files, and use the task `parquet` or `jsonl` on them"


class HubConfig(RowConfig):
    """Settings of `hub`."""

    dataset: str = Field(min_length=1, description="id on the hub, such as openai/gsm8k")
    subset: str = Field(default="", description="its subset (configuration); empty = its only one")
    revision: str | None = Field(
        default=None, description="branch, tag or commit; null = the newest commit"
    )
    split: str = Field(default="train", min_length=1, description="the split that trains")
    held_out_split: str | None = Field(
        default=None, description="the split that is held out; null = part of `split`, by content"
    )
    limit: int | None = Field(
        default=None, ge=2, description="rows of `split` to read at most; null = all"
    )
    streaming: bool = Field(
        default=False,
        description="download no more than is read, and keep nothing; else splits are downloaded "
        "whole, and found again without a network",
    )


class HubTask(RowTask[HubConfig]):
    """Problems of a hub's data set. Formula: key = the prompt, in Unicode's NFC.

    The commit that `revision` stands for is asked of the hub first, and read. No code of the data
    set is run. Held out are the rows of `held_out_split`, or without one those with sha256(key) mod
    1000 < held_out_permille.
    Source: own; read through https://github.com/huggingface/datasets.
    """

    name = "hub"
    Config = HubConfig

    def read(self) -> tuple[Iterator[JsonRow], Iterator[JsonRow] | None]:
        """The rows of both splits."""
        config = self.config
        wanted = HubSource(config.dataset, config.subset, config.revision)
        self._hub = hub = resolve_revision(wanted, FIX)
        apart = None
        if config.held_out_split is not None:
            apart = hub_rows(hub, config.held_out_split, FIX, streaming=config.streaming)
        rows = hub_rows(hub, config.split, FIX, streaming=config.streaming, limit=config.limit)
        return rows, apart

    def source(self) -> str:
        """The data set and its commit."""
        return f"hub {self._hub}"
