"""The plugin manager: loads entry points, refuses what is ambiguous, builds plugins.

It is an object that is passed around. Tests make one with `load_entry_points=False` and register
the modules they need.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import pluggy
from pydantic import ValidationError

from posttrain.core import hooks
from posttrain.core.contracts import Component, Plugin, PluginConfig, Stage, StageBase, Task
from posttrain.core.contracts.validity import fault
from posttrain.core.errors import ConfigError, PosttrainError, nearest, shortlist
from posttrain.core.runtime.plugin_files import PLUGIN_FILE, PluginFiles, load_file
from posttrain.core.runtime.sources import local_source, plugin_source

AnyPlugin = Plugin[Any]  # Any: the manager handles plugins of every config type
PluginT = TypeVar("PluginT", bound=AnyPlugin)
LOCAL = "local"
"""The package of a plugin in a file that belongs to none."""


@dataclass(frozen=True, slots=True)
class PluginEntry:
    """One offered plugin and where it comes from.

    `name` is what a configuration calls it: the class's own name, or for one in a file
    `FILE.py:CLASS`. `local` is then the digest of the file, as it was loaded.
    """

    kind: str
    name: str
    cls: type[AnyPlugin]
    package: str
    version: str
    local: str = ""

    @property
    def source(self) -> str:
        """Digest of the files it is made of; empty for the built-in ones."""
        return self.local or plugin_source(self.cls, self.package)


class PluginManager:
    """Every plugin by (kind, name). Raises `ConfigError` on duplicates and misspelt hooks.

    Plugins in files (`FILE.py:CLASS`) are loaded when they are first asked for; `files` are those
    that a configuration names, and `local_stages` the stage kinds that were found in files.
    """

    def __init__(self, *, load_entry_points: bool = True) -> None:
        self.hooks = pluggy.PluginManager(hooks.PROJECT_NAME)
        self.hooks.add_hookspecs(hooks)
        self._entries: dict[tuple[str, str], PluginEntry] = {}
        self._seen_modules: set[str] = set()
        self.files = PluginFiles()
        self.local_stages: dict[str, PluginEntry] = {}
        if load_entry_points:
            self._load_entry_points()

    def _load_entry_points(self) -> None:
        for entry_point in importlib.metadata.entry_points(group=hooks.ENTRY_POINT_GROUP):
            dist = entry_point.dist
            package, version = (dist.name, dist.version) if dist else ("unknown", "0")
            try:
                loaded = entry_point.load()
                # An entry point is a module with hooks, or a function that lists such modules.
                modules = loaded() if callable(loaded) else [loaded]
                for module in modules:
                    self.register(module, package=package, version=version)
            except PosttrainError:
                raise
            except (Exception, SystemExit) as error:  # somebody else's code
                raise ConfigError(
                    f"package '{package}' {version} offers plugins in '{entry_point.value}', which "
                    f"cannot be loaded: {type(error).__name__}: {error}; correct or uninstall it"
                ) from error

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
                self.add(cls, package=package, version=version)

    def add(self, cls: type[AnyPlugin], *, package: str = "local", version: str = "0") -> None:
        """Offer one plugin class; raises `ConfigError` for one that cannot be used."""
        if wrong := fault(cls):
            raise ConfigError(f"package '{package}' offers {_address(cls)}, which {wrong}")
        kind, name = cls.kind, cls.name
        known = self._entries.get((kind, name))
        if known is not None:
            raise ConfigError(
                f"two plugins offer {kind} '{name}': {known.cls.__module__} (from {known.package}) "
                f"and {cls.__module__} (from {package}); rename or uninstall one"
            )
        self._entries[(kind, name)] = PluginEntry(kind, name, cls, package, version)

    def offer(self, cls: type[AnyPlugin]) -> PluginEntry:
        """Take one class, in the place of any plugin of its kind and name; for authors' tests."""
        if wrong := fault(cls):
            raise ConfigError(f"{_address(cls)} {wrong}")
        entry = PluginEntry(cls.kind, cls.name, cls, LOCAL, "0")
        self._entries[(cls.kind, cls.name)] = entry
        return entry

    def entries(self, kind: str | None = None) -> list[PluginEntry]:
        """All plugins, or those of one kind, sorted by kind and name."""
        found = [e for e in self._entries.values() if kind in (None, e.kind)]
        return sorted(found, key=lambda entry: (entry.kind, entry.name))

    def find(self, kind: str, name: str) -> PluginEntry:
        """The plugin of this kind and name, or `ConfigError` with the nearest spelling."""
        entry = self._entries.get((kind, name))
        if entry is None and ".py" in name:
            return self._in_file(kind, name)
        if entry is None:
            known = [e.name for e in self.entries(kind)]
            raise ConfigError(
                f"no {kind} named '{name}'{nearest(name, known)} "
                f"(installed: {shortlist(name, known)})"
            )
        return entry

    def add_files(self, files: Mapping[str, str | Path]) -> None:
        """Take files of plugins by their short names; a copy takes the place of its original."""
        self.files.paths.update({name: Path(path) for name, path in files.items()})

    def local_name(self, text: str, *folders: Path) -> str:
        """What to call the plugin `text`: of a path, looked for in `folders` and in the working
        directory, a short name that `find` knows; of any other text, itself."""
        return self.files.short(text, (*folders, Path.cwd()))

    def _in_file(self, kind: str, name: str) -> PluginEntry:
        """The plugin of this kind that `FILE.py:CLASS` names."""
        entry = self.in_file(name)
        if entry.kind != kind:
            raise ConfigError(
                f"{name} is a plugin of kind '{entry.kind}', and one of kind '{kind}' is needed "
                f"here: name another class, or use it where a {entry.kind} is named"
            )
        if kind == "stage":
            self.local_stages[name] = entry
        return entry

    def in_file(self, name: str) -> PluginEntry:
        """The plugin that `FILE.py:CLASS` names, of whatever kind."""
        found = PLUGIN_FILE.fullmatch(name)
        file = Path(found["file"] if found else name.rpartition(".py")[0] + ".py").expanduser()
        path = self.files.paths.get(file.as_posix(), file)
        if not path.is_file():
            hint = nearest(path.name, [each.name for each in path.parent.glob("*.py")])
            raise ConfigError(
                f"there is no file '{path}' for the plugin '{name}'{hint}; a path is relative to "
                "the config file that names it, or to the working directory"
            )
        module, offered = load_file(path), _classes_in(path)
        plugins = [n for n, each in offered.items() if issubclass(each, Plugin)]
        listed = f"plugin classes in it: {plugins}" if plugins else "there is no plugin class in it"
        if found is None:
            example = f"{file}:{plugins[0] if plugins else 'CLASS'}"
            raise ConfigError(f"'{name}' names a file without a class: write {example} ({listed})")
        self.files.used.add(file.as_posix())
        cls = getattr(module, found["cls"], None)
        if cls is None:
            close = nearest(found["cls"], offered)
            raise ConfigError(f"{path} has no class '{found['cls']}'{close} ({listed})")
        if wrong := fault(cls):
            raise ConfigError(f"{path}: {found['cls']} {wrong}")
        return PluginEntry(cls.kind, name, cls, LOCAL, "file", self._local_source(path, cls))

    def _local_source(self, path: Path, cls: type[AnyPlugin]) -> str:
        """The digest of a plugin's file, and of plugins of other packages that it derives from."""
        entries = [e for e in self.entries() if e.cls in cls.__mro__[1:]]
        bases = [e.source for e in entries if e.source]
        own = local_source(path)
        return hashlib.sha256("".join([own, *bases]).encode()).hexdigest() if bases else own

    def all_in_file(self, path: Path) -> list[PluginEntry]:
        """Every plugin that the file at `path` defines; `ConfigError` where there is none."""
        if not path.is_file():
            raise ConfigError(f"there is no file '{path}'; name a Python file with plugins")
        names = [
            name
            for name, cls in _classes_in(path).items()
            if issubclass(cls, Plugin) and not (inspect.isabstract(cls) and "name" not in vars(cls))
        ]
        if not names:
            raise ConfigError(
                f"{path} defines no plugin class: derive one from a base class of "
                "posttrain.core.contracts"
            )
        return [self.in_file(self.local_name(f"{path}:{name}")) for name in names]

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

    def task(self, chosen: Component) -> Task[Any]:
        """Build a task and those that it is made of."""
        task: Task[Any] = self.build(Task, chosen.name, chosen.fields())
        if parts := task.parts():
            task.setup({label: self.task(part) for label, part in parts.items()})
        return task

    def stage(self, config: StageBase) -> Stage[Any]:
        """What runs a stage of a resolved config."""
        plugin = self.find("stage", config.kind).cls(config)
        assert isinstance(plugin, Stage)
        return plugin


def _classes_in(path: Path) -> dict[str, type]:
    """The classes that a file defines, by name."""
    module = load_file(path)
    return {
        each.__name__: each
        for each in vars(module).values()
        if inspect.isclass(each) and each.__module__ == module.__name__
    }


def _address(cls: object) -> str:
    if inspect.isclass(cls):
        return f"the class {cls.__module__}.{cls.__qualname__}"
    return repr(cls)
