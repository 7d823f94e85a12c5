"""Whether torch.compile can work here; it says so itself only in the middle of a run."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import torch

from posttrain.core.errors import ResourceError


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
