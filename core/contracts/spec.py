"""How a plugin is described to another process: where its class is, and its config.

The process that chose it found the class through the plugin manager. Another one imports only the
modules of those it was given: loading every installed plugin costs seconds and may start threads.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from posttrain.core.contracts.base import Plugin
from posttrain.core.errors import ConfigError, ResourceError
from posttrain.core.runtime.plugin_files import file_of, load_file, places
from posttrain.core.runtime.sources import files_of

if TYPE_CHECKING:  # a reward worker without a sandbox loads none
    from posttrain.core.sandbox.required import Isolation

PluginT = TypeVar("PluginT", bound=Plugin[Any])
MOST_SHIPPED = 64 * 2**20
"""Bytes of local plugin files that are sent to a node."""


@dataclass(frozen=True, slots=True)
class PluginSpec:
    """The address of a plugin's class, with the file of a module that is in no package, and its
    config as JSON.
    """

    kind: str
    name: str
    module: str
    qualname: str
    config: dict[str, object]
    file: Path | None = None

    def load(self, contract: type[PluginT]) -> type[PluginT]:
        """The class. Raises what importing it raises, `ConfigError` where it is something else."""
        module = importlib.import_module(self.module) if not self.file else load_file(self.file)
        found: object = attrgetter(self.qualname)(module)
        if not (isinstance(found, type) and issubclass(found, contract)):
            raise ConfigError(f"{self.module}.{self.qualname} is not a {contract.kind}")
        return found

    def make(self, contract: type[PluginT]) -> PluginT:
        """The plugin with its config."""
        cls = self.load(contract)
        return cls(cls.Config.model_validate(self.config))

    @property
    def missing(self) -> str:
        """What this machine lacks of it, for the start of a sentence; empty where it is there."""
        root = self.module.partition(".")[0]
        if self.file is not None or find_spec(root) is not None:
            return ""
        return f"{self.kind} '{self.name}' is not installed there (package {root})"


def spec_of(plugin: Plugin[Any], where: str, instead: str) -> PluginSpec:
    """The spec of `plugin`. Raises `ConfigError` for a class that another process cannot import:
    it says `where` the plugin runs, and what to do `instead` of moving it.
    """
    cls = type(plugin)
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
        raise ConfigError(
            f"{cls.kind} '{plugin.name}' ({cls.__module__}.{cls.__qualname__}) runs {where}, which "
            "cannot import it from there: define the class at the top of a module of its own, or "
            f"{instead}"
        )
    config = plugin.config.model_dump(mode="json")
    file = file_of(cls.__module__)
    return PluginSpec(cls.kind, plugin.name, cls.__module__, cls.__qualname__, config, file)


@dataclass(frozen=True, slots=True)
class Shipped:
    """Specs with the contents of their local files, for a machine that may not see these.

    A copy is the same module as its original, since its name is of its content.
    """

    specs: tuple[PluginSpec, ...]
    contents: dict[str, bytes]
    isolations: tuple[Isolation, ...]

    @classmethod
    def of(cls, specs: Sequence[PluginSpec], isolations: Iterable[Isolation]) -> Shipped:
        """Raises `ConfigError` where the files are too large to be sent along."""
        files = {str(spec.file): spec.file for spec in specs if spec.file is not None}
        placed = places(files)
        contents: dict[str, bytes] = {}
        size = 0
        for name, file in files.items():
            for relative, path in files_of(file):
                place = (Path(placed[name]).parent / relative).as_posix()
                size += 0 if place in contents else path.stat().st_size
                if size > MOST_SHIPPED:
                    raise ConfigError(
                        f"{file} and what belongs to it are more than {MOST_SHIPPED >> 20} MiB, "
                        "which is too much to send to each node: install it as a package on all "
                        "nodes, and let it read large files from storage that they share"
                    )
                contents[place] = path.read_bytes()
        moved = (
            spec if spec.file is None else replace(spec, file=Path(placed[str(spec.file)]))
            for spec in specs
        )
        return cls(tuple(moved), contents, tuple(isolations))

    def unpacked(self, folder: Path) -> tuple[PluginSpec, ...]:
        """The specs, with their files below `folder`.

        Raises `ResourceError` where this machine lacks a package, or its sandbox is too weak.
        """
        for isolation in self.isolations:
            isolation.check()
        for missing in filter(None, (spec.missing for spec in self.specs)):
            raise ResourceError(f"{missing}: install it on that node as on the others")
        for place, content in self.contents.items():
            path = folder / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return tuple(
            spec if spec.file is None else replace(spec, file=folder / spec.file)
            for spec in self.specs
        )
