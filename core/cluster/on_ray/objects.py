"""Files in Ray's object store, and from there into a folder of a node."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import ray

from posttrain.core.cluster.shared import SharedFiles
from posttrain.core.errors import ResourceError
from posttrain.core.runtime.processes import is_left_behind, owner

MEMORY = Path("/dev/shm")  # noqa: S108 - folders in it are made by `mkdtemp`
PREFIX = "posttrain-files-"
SPARE = 1.1
"""A folder in memory is used if so many times the files' bytes are free there."""


def put_files(files: Iterable[tuple[str, bytes]]) -> SharedFiles:
    """Put (name, content) pairs into the store, owned by this process."""
    digests: dict[str, str] = {}
    references, size = [], 0
    for name, content in files:
        digests[name] = hashlib.sha256(content).hexdigest()
        references.append(ray.put(np.frombuffer(content, dtype=np.uint8)))
        size += len(content)
    return SharedFiles(digests, tuple(references), size)


async def write_files(files: SharedFiles, limit_s: float) -> Path:
    """A new folder of this node with the files; in memory, if there is room.

    They come to the node's store once, whoever asks there. Raises `ResourceError` where they do
    not come within `limit_s`, or cannot be written.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{owner()}-", dir=_parent(files.num_bytes)))
    try:
        async with asyncio.timeout(limit_s):
            for name, reference in zip(files.digests, files.references, strict=True):
                content: np.ndarray = await reference
                await asyncio.to_thread(content.tofile, folder / Path(name).name)
    except (OSError, TimeoutError, ray.exceptions.RayError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        what = str(error) or f"they did not come within {limit_s:g} s"
        raise ResourceError(
            f"files of {files.num_bytes} bytes cannot be written to {folder.parent}: {what}"
        ) from error
    return folder


def _parent(num_bytes: int) -> Path:
    try:
        if shutil.disk_usage(MEMORY).free > SPARE * num_bytes:
            return MEMORY
    except OSError:
        pass
    return Path(tempfile.gettempdir())


def remove_left_behind() -> None:
    """Remove folders of processes that were killed before they could."""
    for parent in {MEMORY, Path(tempfile.gettempdir())}:
        for folder in parent.glob(f"{PREFIX}*"):
            reported = folder.name.removeprefix(PREFIX).rpartition("-")[0]
            if is_left_behind(reported):
                shutil.rmtree(folder, ignore_errors=True)
