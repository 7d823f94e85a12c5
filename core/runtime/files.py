"""Files and folders that are whole or absent, and databases made from schema files.

The first line of a file names the library and the version whose migrations lead to the same tables
(`infra/make_schemas.py` writes the files, and a test compares).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import shutil
import sqlite3
import stat
import uuid
from collections.abc import Iterator
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError


def put_in_place(partial: Path, final: Path, *, replace: bool = True) -> None:
    """Rename a finished folder to its final name, in place of what is there; both on one disk.

    Without `replace`, raises `OSError` where anything but an empty folder is there.

    Its files reach the disk before the name does: after a crash the name is there with all of them,
    or it is not there.
    """
    for folder, _, files in os.walk(partial, topdown=False):
        for name in files:
            sync(Path(folder) / name)
        sync(Path(folder))
    while replace:
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
    else:
        partial.rename(final)
    sync(final.parent)


@contextlib.contextmanager
def whole_folder(final: Path) -> Iterator[Path]:
    """A new folder to write into, put in place as `final` at the end; gone after an error."""
    partial = final.with_name(f".partial-{final.name}-{uuid.uuid4().hex[:8]}")
    partial.mkdir(parents=True)
    try:
        yield partial
        put_in_place(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file that nobody writes to a second name; a copy where the disk has no such names."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copy2(source, target)


def irregular(path: Path) -> str:
    """What `path` is if it is not a file that ends: a folder, a named pipe, ...; empty for a file.

    Reading a pipe or a device can wait for ever. Raises `OSError` where there is nothing.
    """
    mode = path.stat().st_mode
    if stat.S_ISREG(mode):
        return ""
    kinds = {stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a named pipe", stat.S_ISSOCK: "a socket"}
    return next((kind for test, kind in kinds.items() if test(mode)), "a device")


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Replace a file whole: after a crash it holds the old text or the new one, never a part."""
    write_bytes(path, text.encode())


def _takes_bytes(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def write_bytes(path: Path, data: bytes) -> None:
    """As `write_text`. A device or a pipe, such as /dev/stdout, is written into, never replaced."""
    if _takes_bytes(path):
        # Without a reader, a pipe is an error instead of a wait without end.
        with open(os.open(path, os.O_WRONLY | os.O_NONBLOCK), "wb") as stream:
            os.set_blocking(stream.fileno(), True)
            stream.write(data)
        return
    if path.exists() and path.stat().st_dev != path.lstat().st_dev:
        path = path.resolve()  # /dev/stdout that was sent to a file
    if path.is_dir():  # "" and "/" have no name that another could be made of
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    partial = path.with_name(f".partial-{path.name}-{uuid.uuid4().hex[:12]}")
    try:
        partial.write_bytes(data)
        sync(partial)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


class WrongContent(ValueError):
    """A file of ours does not hold what was written; the message says why, without its name."""


@functools.cache
def _shape(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def of_shape(value: object, kind: Any) -> Any:  # Any: JSON of a type that is known at run time
    """`value`, of JSON, if it is what the type `kind` says; raises `WrongContent` otherwise."""
    try:
        _shape(kind).validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise WrongContent(f"{place or 'the whole'}: {first['msg']}") from error
    return value


def read_json(path: Path, kind: Any) -> Any:  # Any: JSON of a type that is known at run time
    """The JSON of a file of ours; raises `WrongContent` if it is not what `kind` says.

    `kind` is a type such as `dict[str, str]`, or a pydantic model for an object with known keys.
    """
    try:
        return of_shape(json.loads(path.read_bytes()), kind)
    except WrongContent:
        raise
    except OSError as error:
        raise WrongContent(f"it cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise WrongContent(f"it is not JSON: {error}") from error


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
