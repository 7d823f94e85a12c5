"""Replies kept on disk, one file a key, for any number of processes at once."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path

from posttrain.core.errors import ResourceError


def key_of(parts: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class ReplyCache:
    """Texts by key below `folder`. A file appears whole or not at all; a damaged one is a miss."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(self.folder, error) from error

    def get(self, key: str) -> str | None:
        try:
            kept = json.loads(self._file(key).read_text("utf-8"))["reply"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return kept if isinstance(kept, str) else None

    def put(self, key: str, reply: str) -> None:
        """Keep `reply`; of several writers the last one stays."""
        file = self._file(key)
        partial = file.with_name(f"{key}.{uuid.uuid4().hex}.partial")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps({"reply": reply}), "utf-8")
            os.replace(partial, file)
        except OSError as error:
            raise _unwritable(self.folder, error) from error

    def _file(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"


def _unwritable(folder: Path, error: OSError) -> ResourceError:
    return ResourceError(
        f"the judge's cache '{folder}' cannot be written ({error.strerror}): name another folder "
        "as `cache`, or null for none"
    )
