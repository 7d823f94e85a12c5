"""Files and folders that are whole or absent, and databases made from schema files.

The first line of a file names the library and the version whose migrations lead to the same tables
(`infra/make_schemas.py` writes the files, and a test compares).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3
import uuid
from contextlib import closing
from importlib.metadata import version
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
    partial = path.with_name(f".partial-{path.name}-{uuid.uuid4().hex[:12]}")
    partial.write_text(text, encoding="utf-8")
    sync(partial)
    partial.replace(path)
    sync(path.parent)


def create_database(database: Path, schema: Path, library: str) -> bool:
    """Make `database` if it is missing and `schema` is of the installed version of `library`.

    It appears whole or not at all. Returns whether it was made; then it still lacks what the
    library adds when it opens it.
    """
    if database.exists():
        return False
    first, _, script = schema.read_text(encoding="utf-8").partition("\n")
    if first != f"-- {library} {version(library)}":
        return False
    partial = database.with_name(f".partial-{uuid.uuid4().hex[:12]}.db")
    with closing(sqlite3.connect(partial)) as connection:
        connection.executescript(script)
    os.replace(partial, database)
    return True
