"""What this machine can do: processor instructions and torch.compile."""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
from pathlib import Path

import torch

from posttrain.core.errors import ResourceError


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


def check_compiler(device: torch.device) -> None:
    """Raise `ResourceError` unless kernels can be compiled for `device`."""
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            raise ResourceError(
                "model.compile is true, which on a GPU needs the package triton, and it is not "
                "installed: install it, or set model.compile: false"
            )
        return
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        raise ResourceError(
            f"model.compile is true, which on a CPU needs a C++ compiler, and '{compiler}' is not "
            "on the path: install it (Debian: apt install g++), name another one in CXX, or set "
            "model.compile: false"
        )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        raise ResourceError(
            f"model.compile is true, which on a CPU needs Python's headers, and {header} does not "
            "exist: install them (Debian: apt install python3-dev), or set model.compile: false"
        )


def allow_open_files(count: int) -> None:
    """Let this process open `count` files, or as many as the system lets it: often 1,024 at first,
    and each connection is one."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
