"""What is wrong with a class that somebody offers as a plugin, in one sentence."""

from __future__ import annotations

import inspect
import re
from typing import Any, TypeVar

from posttrain.core.contracts import CONTRACTS, Algorithm, Plugin, PluginConfig
from posttrain.core.errors import nearest
from posttrain.core.types import RUN_SECTIONS

_REWARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")  # it is part of metrics' names
_HOME = "posttrain.core.contracts"


def fault(cls: object) -> str:
    """What `cls` lacks to be a plugin and what to write, as the end of a sentence; empty if
    nothing.
    """
    if not inspect.isclass(cls):
        return f"is {_kind_of_value(cls)}, expected a class: offer the class itself"
    if not issubclass(cls, Plugin):
        return f"is not a plugin class: derive it from {_likely_base(cls)} of {_HOME}"
    kind = getattr(cls, "kind", None)
    if kind not in CONTRACTS:
        return (
            f"has the kind {kind!r}, expected one of {sorted(CONTRACTS)}: derive it from "
            f"{_likely_base(cls)} of {_HOME}, which sets it"
        )
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not name.strip():
        return f"has no name: write name = '{snake(cls.__name__)}' in it"
    if kind == "reward" and not _REWARD_NAME.fullmatch(name):
        return (
            f"has the name {name!r}, expected letters, digits, _, . and -, such as "
            f"'{snake(cls.__name__)}': rename it"
        )
    return _config_fault(cls) or _stage_fault(cls) or _preset_fault(cls) or _missing_methods(cls)


def _config_fault(cls: type[Any]) -> str:
    """What is wrong with its `Config`; Any: plugins of every config type."""
    config = getattr(cls, "Config", None)
    if config is None:
        return (
            "has no Config: write Config = NoConfig in it, or a class with its settings that "
            f"derives from {config_base(cls).__name__}, both of {_HOME}"
        )
    if not inspect.isclass(config):
        return f"has {_kind_of_value(config)} as its Config, expected a class: write the class"
    wanted = config_base(cls)
    if not issubclass(config, wanted):
        bases = ", ".join(base.__name__ for base in config.__bases__)
        return (
            f"has the Config {config.__name__}, which derives from {bases}: derive it from "
            f"{wanted.__name__} of {_HOME}"
        )
    return ""


def _stage_fault(cls: type[Any]) -> str:
    """What a stage's config does not say of the stage; empty for other kinds."""
    if cls.kind != "stage":
        return ""
    config = cls.Config
    what = f"has the Config {config.__name__}, which"
    if not isinstance(getattr(config, "makes", None), str):
        return f"{what} does not say what the stage makes: set `makes`, as in 'dataset'"
    if unknown := sorted(set(config.sections) - set(RUN_SECTIONS)):
        return f"{what} has the sections {unknown}: choose from {list(RUN_SECTIONS)}"
    if taken := sorted(set(config.model_fields) & set(RUN_SECTIONS) - {"evaluation"}):
        return f"{what} has fields named as sections of the run, {taken}: rename them"
    if config.passes_on and config.passes_on not in config.reads:
        return f"{what} passes on '{config.passes_on}', not an input: add it to `reads`"
    return ""


def _preset_fault(cls: type[Any]) -> str:
    """A preset that sets nothing; empty for other kinds."""
    if not issubclass(cls, Algorithm) or cls.fields or cls.expand is not Algorithm.expand:
        return ""
    return (
        "sets no fields of a stage: write them in it, such as fields = {'advantage': 'grpo'}, or "
        "define expand(self), which returns them"
    )


def config_base(cls: type[Any]) -> type[PluginConfig]:
    """The class that the plugin's config must derive from, by the contract it implements."""
    found: type[PluginConfig] = PluginConfig
    for base in cls.__mro__:
        for variable in getattr(base, "__parameters__", ()):
            bound = variable.__bound__ if isinstance(variable, TypeVar) else None
            bound = bound if inspect.isclass(bound) else PluginConfig
            if issubclass(bound, found):
                found = bound
    return found


def _missing_methods(cls: type[Any]) -> str:
    """Which methods of the contract are missing, with how they are written."""
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if not missing:
        return ""
    own = [name for name in vars(cls) if not name.startswith("__")]
    shown = []
    for name in missing:
        function = getattr(cls, name)
        function = getattr(function, "__func__", function)
        close = nearest(name, [each for each in own if each not in missing])
        written = f" (it has '{close.split(chr(39))[1]}': is that meant?)" if close else ""
        shown.append(f"{name}({', '.join(inspect.signature(function).parameters)}){written}")
    base = next(b for b in cls.__mro__[1:] if b.__module__.startswith(_HOME))
    return f"lacks what {base.__name__} asks for: define {' and '.join(shown)}"


def _likely_base(cls: type) -> str:
    """The contract whose methods it has, else how to find one."""
    for base in CONTRACTS.values():
        methods: frozenset[str] = getattr(base, "__abstractmethods__", frozenset())
        if methods and methods <= set(dir(cls)):
            return base.__name__
    return "one of the base classes (posttrain plugins list shows the kinds)"


def _kind_of_value(value: object) -> str:
    if inspect.isroutine(value):
        return "a function"
    return f"a value of type {type(value).__name__} ({str(value)[:40]})"


def snake(name: str) -> str:
    """`BriefAnswer` as `brief_answer`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
