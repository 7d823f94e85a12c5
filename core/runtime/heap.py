"""The C allocator: freed memory is kept while that pays, and given back when it does not."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from pathlib import Path

import torch

from posttrain.core.runtime.startup import release_free_memory

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEEP_BYTES = 2**31 - 1
_FIRST_STEPS = 2  # moments are made in the first one, after its peak: the second needs more
_GROWTH = 1.1  # over what a step needs; the third that a heap may grow by is refused
_STATM = Path("/proc/self/statm")


def keep_freed_memory() -> bool:
    """Stop glibc from returning large buffers to the kernel on every free; True when it took.

    Each buffer above 32 MB is otherwise mapped, zeroed page by page and unmapped again, which costs
    several times the softmax that it holds.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _KEEP_BYTES) and mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES))


def release_memory() -> None:
    """Free what a finished stage left: reference cycles first, then glibc's kept pages."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim_heap()


def trim_heap() -> None:
    if release_free_memory():
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def resident_bytes() -> int:
    """Memory of this process that is in RAM now; 0 where the system does not say."""
    if not _STATM.exists():
        return 0
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class StepHeap:
    """Trims the heap after a step that left it larger than steps need.

    Buffers of ever new sizes leave holes that no later one fits, and resident memory grows by a
    third over 30 steps. Trimming after every step would fix that, but the next step then has all
    its pages mapped and zeroed again, which took a third of the step on a virtual machine whose
    host
    takes free pages back. What steps need is seen in the first two, and after each one that follows
    a trim.
    """

    def __init__(self) -> None:
        self._needed = self._steps = 0
        self._trimmed = False

    def step_done(self) -> None:
        """Call it when the step's buffers are free."""
        resident = resident_bytes()
        self._steps += 1
        if self._trimmed or self._steps <= _FIRST_STEPS:
            self._needed = max(self._needed, resident)
        self._trimmed = resident > _GROWTH * self._needed
        if self._trimmed:
            trim_heap()
