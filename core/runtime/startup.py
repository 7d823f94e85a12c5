"""What is set before torch is loaded: the allocator, and how long waiting threads spin.

glibc gives each new tensor the smallest hole of its heap that fits, cold memory found by walking
lists that grow as a process gets older; tcmalloc gives what was freed last. An allocator can only
be put in before a process starts, so the command starts itself again, once, under the same process
id. What it starts afterwards has glibc's again: sandboxes, compilers, servers.

libgomp reads the variables once, when torch is loaded.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

LIBRARY = "libtcmalloc_minimal.so.4"
CHOICE = "POSTTRAIN_ALLOCATOR"
"""Environment variable; `system` leaves glibc's in place."""
COMMANDS = frozenset({"run", "plan", "replay"})
BEFORE = "POSTTRAIN_PRELOAD_BEFORE"
_FOLDERS = ("usr/lib/*-linux-gnu", "usr/lib64", "usr/lib", "usr/local/lib")


def find_allocator() -> Path | None:
    """The library, if it is installed where libraries are."""
    if not sys.platform.startswith("linux"):
        return None
    found = (path for folder in _FOLDERS for path in Path("/").glob(f"{folder}/{LIBRARY}"))
    return next(found, None)


def is_used() -> bool:
    """Whether this process has it."""
    return hasattr(ctypes.CDLL(None), "MallocExtension_ReleaseFreeMemory")


def use_allocator(arguments: Sequence[str]) -> None:
    """Start the command again with it, if `arguments` (without the program's name) are of one.

    Returns in the new process, with the environment as it was, or where there is nothing to do.
    """
    before = os.environ.pop(BEFORE, None)
    if before is not None:  # the new process
        if before:
            os.environ["LD_PRELOAD"] = before
        else:
            os.environ.pop("LD_PRELOAD", None)
        return
    if not COMMANDS.intersection(arguments[:1]) or os.environ.get(CHOICE) == "system":
        return
    preload = preloaded(os.environ)
    if not preload or not sys.executable:
        return
    environment = {**os.environ, **preload, BEFORE: os.environ.get("LD_PRELOAD", "")}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def preloaded(environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment of a process that is to have it; nothing where none is found.

    Another allocator that is named there stays.
    """
    library, others = find_allocator(), environment.get("LD_PRELOAD", "")
    if library is None or "malloc" in others:
        return {}
    return {
        "LD_PRELOAD": f"{library} {others}".strip(),
        # It would tell of every tensor above a gigabyte.
        "TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD": str(2**62),
    }


def release_free_memory() -> bool:
    """Give what it keeps back to the kernel; False where it is not used."""
    if not is_used():
        return False
    ctypes.CDLL(None).MallocExtension_ReleaseFreeMemory()
    return True


SPIN_COUNT = "GOMP_SPINCOUNT"
WAIT_POLICY = "OMP_WAIT_POLICY"
SPINS = 10_000
"""0.1 to 0.5 ms by processor: longer than Python takes between two operations."""


def bounded_waiting(environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment of a process that computes; a choice of the user's stays."""
    if SPIN_COUNT in environment or WAIT_POLICY in environment:
        return {}
    return {SPIN_COUNT: str(SPINS)}


def bound_waiting() -> None:
    """Set it for this process, before it loads torch, and for what it starts."""
    os.environ.update(bounded_waiting(os.environ))
