"""The built-in plugins, one idea per file, loaded through an entry point as a third party's are."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType


def modules() -> list[ModuleType]:
    """Every plugin module under this package: a new built-in is one new file, nothing else."""
    found = []
    for package in pkgutil.iter_modules(__path__, prefix=f"{__name__}."):
        if package.ispkg:
            folder = importlib.import_module(package.name)
            for module in pkgutil.iter_modules(folder.__path__, prefix=f"{package.name}."):
                found.append(importlib.import_module(module.name))
    return found
