"""Folders that are whole or absent, also after the power fails."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path


def put_in_place(partial: Path, final: Path) -> None:
    """Rename a finished folder to its final name, in place of what is there; both on one disk.

    Its files reach the disk before the name does: after a crash the name is there with all of them,
    or it is not there.
    """
    for folder, _, files in os.walk(partial, topdown=False):
        for name in files:
            sync(Path(folder) / name)
        sync(Path(folder))
    while True:
        aside = partial.with_name(f"{partial.name}.old")
        with contextlib.suppress(FileNotFoundError):
            final.rename(aside)
        try:
            partial.rename(final)
        except OSError as error:
            # Another process put its own there in between.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            continue
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        break
    sync(final.parent)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Replace a file whole: after a crash it holds the old text or the new one, never a part."""
    partial = path.with_name(f".partial-{path.name}-{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    sync(partial)
    partial.replace(path)
    sync(path.parent)
