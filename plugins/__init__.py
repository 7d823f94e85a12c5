"""The built-in plugins, one idea per file, registered here once for all of them.

A new built-in is one new file in the folder of its kind: a config and a class, nothing else.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from types import ModuleType
from typing import Any

from posttrain.core.contracts import Plugin
from posttrain.core.errors import ConfigError
from posttrain.core.hooks import hookimpl

AnyPlugin = Plugin[Any]  # Any: plugins of every config type


@hookimpl
def posttrain_register() -> list[type[AnyPlugin]]:
    """Every plugin class of every module one folder below this one, in order of their paths."""
    found = []
    for folder in pkgutil.iter_modules(__path__, prefix=f"{__name__}."):
        package = importlib.import_module(folder.name)
        for module in pkgutil.iter_modules(package.__path__, prefix=f"{folder.name}."):
            found += defined_in(importlib.import_module(module.name))
    return found


def defined_in(module: ModuleType) -> list[type[AnyPlugin]]:
    """The concrete plugin classes that `module` itself defines, in its order, at least one."""
    found = [
        cls
        for cls in vars(module).values()
        if inspect.isclass(cls)
        and issubclass(cls, Plugin)
        and cls.__module__ == module.__name__
        and not inspect.isabstract(cls)
    ]
    if not found:
        raise ConfigError(f"built-in module '{module.__name__}' defines no plugin class")
    return found
