"""The samples of each step, kept before they are learned from.

What an environment with a life of its own answered cannot be asked for again, nor when it did. So
a run that goes on after a kill, and a replay, take the samples of a step from here.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posttrain.core.runtime.files import write_bytes

FOLDER = "episodes"
"""Among a stage's checkpoints while it runs, and in its artifact."""
Json = dict[str, Any]  # Any: JSON


class EpisodeLog:
    """A file for each step in `folder`; `warn` hears of one that is damaged."""

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self.folder, self._warn = folder, warn

    def _file(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}.json.gz"

    def write(self, step: int, found: Json) -> None:
        """Keep the samples of `step`; after a crash they are there whole, or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        packed = gzip.compress(json.dumps(found).encode(), compresslevel=1, mtime=0)
        write_bytes(self._file(step), packed)

    def read(self, step: int) -> Json | None:
        """What was kept of `step`; None if nothing was."""
        path = self._file(step)
        if not path.is_file():
            return None
        try:
            found = json.loads(gzip.decompress(path.read_bytes()))
        except (OSError, EOFError, ValueError) as error:
            self._warn(f"{path} is damaged ({error}): the samples of step {step} are drawn again")
            return None
        return found if isinstance(found, dict) else None
