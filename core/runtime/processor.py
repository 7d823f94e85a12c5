"""What the processor can do, asked without importing torch."""

from __future__ import annotations

import functools
import platform
from pathlib import Path


@functools.cache
def has_bfloat16_instructions() -> bool:
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        return False
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "").split()
    return "amx_bf16" in flags or "avx512_bf16" in flags


def processor_name() -> str:
    """The processor's model as the kernel calls it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def cache_bytes(otherwise: int) -> int:
    """What the largest cache of a core holds, as Linux says it; else `otherwise`."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        number = path.read_text("utf-8").strip().removesuffix("K")
        if number.isdecimal():
            sizes.append(int(number) * 1024)
    return max(sizes, default=otherwise)
