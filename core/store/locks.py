"""Locks between processes: held by one at a time, and let go by the kernel when it ends or dies."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from posttrain.core.errors import ResourceError

LOOK_AGAIN_S = 0.2


def _nothing() -> None:
    """For callers that have nothing to do while they wait."""


@contextmanager
def locked(
    path: Path, *, waits: Callable[[str], None] | None = None, check: Callable[[], None] = _nothing
) -> Iterator[None]:
    """Hold the lock file `path`, which is there only while somebody holds it, or has died with it.

    While another process holds it, `waits` receives once who does ("process 123"), and `check` is
    called several times a second: it may raise to give up. Raises `ResourceError` where the folder
    cannot be written.
    """
    reported = False
    while (descriptor := _acquired(path)) is None:
        if waits is not None and not reported:
            waits(_holder(path))
        reported = True
        check()
        time.sleep(LOOK_AGAIN_S)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held: see `_acquired`
        os.close(descriptor)


def _acquired(path: Path) -> int | None:
    """A descriptor that holds the lock; None while another does.

    Who held the file before removes it, so that the one that was locked may be no file any more:
    then nobody else would see the lock.
    """
    descriptor = _opened(path)
    if _taken(descriptor) and _is_there(path, descriptor):
        return descriptor
    os.close(descriptor)
    return None


def _is_there(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _opened(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ResourceError(
            f"cannot write the lock file {path}: {error.strerror}; check that the folder is "
            "writable and its disk has room, or choose another --home"
        ) from error


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(path: Path) -> str:
    try:
        number = path.read_text("utf-8", errors="replace").strip()[:20]
    except OSError:
        number = ""
    return f"process {number}" if number else "another process"
