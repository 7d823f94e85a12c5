"""The plugin manager: loads entry points, refuses what is ambiguous, builds plugins.

It is an object that is passed around. Tests make one with `load_entry_points=False` and register
the modules they need.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

import pluggy
from pydantic import ValidationError

from posttrain.core import hooks
from posttrain.core.contracts import CONTRACTS, Plugin, PluginConfig, Stage, StageBase
from posttrain.core.errors import ConfigError, nearest, shortlist
from posttrain.core.runtime.sources import plugin_source
from posttrain.core.types import RUN_SECTIONS

AnyPlugin = Plugin[Any]  # Any: the manager handles plugins of every config type
PluginT = TypeVar("PluginT", bound=AnyPlugin)


def _check_stage(cls: type[AnyPlugin], package: str) -> None:
    """Raise `ConfigError` for a stage class whose config does not say what a stage must say."""
    config, wrong = cls.Config, ""
    if not issubclass(config, StageBase):
        wrong = "Config is not a subclass of StageBase: derive it from that"
    elif not isinstance(getattr(config, "makes", None), str):
        wrong = f"{config.__name__} does not say what the stage makes: set `makes`, as in 'dataset'"
    elif unknown := set(config.sections) - set(RUN_SECTIONS):
        wrong = f"{config.__name__}.sections has {sorted(unknown)} (allowed: {list(RUN_SECTIONS)})"
    elif taken := set(config.model_fields) & set(RUN_SECTIONS) - {"evaluation"}:
        wrong = (
            f"{config.__name__} has fields named as sections of the run, {sorted(taken)}: rename"
        )
    elif config.passes_on and config.passes_on not in config.reads:
        wrong = f"{config.__name__}.passes_on is '{config.passes_on}', which is not in `reads`"
    if wrong:
        place = f"{cls.__module__}.{cls.__qualname__}"
        raise ConfigError(f"stage '{cls.name}' ({place}, package {package}): {wrong}")


_REWARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")  # it is part of metrics' names


@dataclass(frozen=True, slots=True)
class PluginEntry:
    """One offered plugin and where it comes from."""

    kind: str
    name: str
    cls: type[AnyPlugin]
    package: str
    version: str

    @property
    def source(self) -> str:
        """Digest of the files it is made of; empty for the built-in ones."""
        return plugin_source(self.cls, self.package)


class PluginManager:
    """Every plugin by (kind, name). Raises `ConfigError` on duplicates and misspelt hooks."""

    def __init__(self, *, load_entry_points: bool = True) -> None:
        self.hooks = pluggy.PluginManager(hooks.PROJECT_NAME)
        self.hooks.add_hookspecs(hooks)
        self._entries: dict[tuple[str, str], PluginEntry] = {}
        self._seen_modules: set[str] = set()
        if load_entry_points:
            self._load_entry_points()

    def _load_entry_points(self) -> None:
        for entry_point in importlib.metadata.entry_points(group=hooks.ENTRY_POINT_GROUP):
            loaded = entry_point.load()
            # An entry point is a module with hooks, or a function that lists such modules.
            modules = loaded() if callable(loaded) else [loaded]
            dist = entry_point.dist
            package, version = (dist.name, dist.version) if dist else ("unknown", "0")
            for module in modules:
                self.register(module, package=package, version=version)

    def register(self, module: ModuleType, *, package: str = "local", version: str = "0") -> None:
        """Register a module's hooks and the plugins it offers."""
        if module.__name__ in self._seen_modules:
            return
        self._seen_modules.add(module.__name__)
        self.hooks.register(module, name=module.__name__)
        try:
            self.hooks.check_pending()
        except pluggy.PluginValidationError as error:
            raise ConfigError(
                f"plugin module '{module.__name__}' has a hook that does not exist: {error}; "
                f"hooks are {sorted(n for n in vars(hooks) if n.startswith('posttrain_'))}"
            ) from error
        if hasattr(module, "posttrain_register"):
            for cls in module.posttrain_register():
                self._add(cls, package, version)

    def _add(self, cls: type[AnyPlugin], package: str, version: str) -> None:
        if not (inspect.isclass(cls) and issubclass(cls, Plugin)):
            raise ConfigError(
                f"package '{package}' registers {cls!r}, which is not a plugin class: derive it "
                "from "
                "one of the base classes in posttrain.core.contracts"
            )
        kind, name = getattr(cls, "kind", None), getattr(cls, "name", None)
        if kind not in CONTRACTS or not name or not getattr(cls, "Config", None):
            raise ConfigError(
                f"plugin class {cls.__module__}.{cls.__qualname__} needs a kind of "
                f"{sorted(CONTRACTS)}, a name and a Config; it has kind={kind!r}, name={name!r}"
            )
        if kind == "reward" and not _REWARD_NAME.fullmatch(name):
            raise ConfigError(
                f"plugin class {cls.__module__}.{cls.__qualname__} has the name {name!r}, expected "
                "letters, digits, _, . and -, such as 'my_reward': rename it"
            )
        if kind == "stage":
            _check_stage(cls, package)
        known = self._entries.get((kind, name))
        if known is not None:
            raise ConfigError(
                f"two plugins offer {kind} '{name}': {known.cls.__module__} (from {known.package}) "
                f"and {cls.__module__} (from {package}); rename or uninstall one"
            )
        self._entries[(kind, name)] = PluginEntry(kind, name, cls, package, version)

    def entries(self, kind: str | None = None) -> list[PluginEntry]:
        """All plugins, or those of one kind, sorted by kind and name."""
        found = [e for e in self._entries.values() if kind in (None, e.kind)]
        return sorted(found, key=lambda entry: (entry.kind, entry.name))

    def find(self, kind: str, name: str) -> PluginEntry:
        """The plugin of this kind and name, or `ConfigError` with the nearest spelling."""
        entry = self._entries.get((kind, name))
        if entry is None:
            known = [e.name for e in self.entries(kind)]
            raise ConfigError(
                f"no {kind} named '{name}'{nearest(name, known)} "
                f"(installed: {shortlist(name, known)})"
            )
        return entry

    def config(self, kind: str, name: str, fields: Mapping[str, object]) -> PluginConfig:
        """Validate `fields` against the plugin's own config; pydantic's error goes to the caller.

        Raises `ConfigError` for an unknown name and `pydantic.ValidationError` for bad fields.
        """
        config: PluginConfig = self.find(kind, name).cls.Config.model_validate(dict(fields))
        return config

    def build(
        self, contract: type[PluginT], name: str, fields: Mapping[str, object] | None = None
    ) -> PluginT:
        """Build the plugin `name` of the contract's kind from its config fields."""
        entry = self.find(contract.kind, name)
        try:
            config = self.config(contract.kind, name, fields or {})
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "config"
            raise ConfigError(
                f"{contract.kind} '{name}': {where}: {first['msg']} (got {first['input']!r})"
            ) from error
        plugin = entry.cls(config)
        if not isinstance(plugin, contract):
            raise ConfigError(f"{contract.kind} '{name}' does not implement {contract.__name__}")
        return plugin

    def stage(self, config: StageBase) -> Stage[Any]:
        """What runs a stage of a resolved config."""
        plugin = self.find("stage", config.kind).cls(config)
        assert isinstance(plugin, Stage)
        return plugin
