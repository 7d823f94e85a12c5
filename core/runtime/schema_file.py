"""A library's empty SQLite database from a file of SQL: migrating from nothing takes it seconds.

The first line of a file names the library and the version whose migrations lead to the same tables
(`infra/make_schemas.py` writes the files, and a test compares).
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from importlib.metadata import version
from pathlib import Path


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
    partial = database.with_name(f".partial-{os.getpid()}.db")
    partial.unlink(missing_ok=True)
    with closing(sqlite3.connect(partial)) as connection:
        connection.executescript(script)
    os.replace(partial, database)
    return True
