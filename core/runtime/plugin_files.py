"""Plugins in files that belong to no package: their short names, their modules, their copies.

A configuration names such a plugin as `PATH.py:CLASS`. Each version of a file is a module of its
own, named by its content, so that an edited file is loaded again, two files of one name stay apart,
and a copy of a file gives the same classes as the file itself.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
import shutil
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from posttrain.core.errors import ConfigError, ResourceError, causes, nearest
from posttrain.core.runtime.sources import OWN, files_of, local_source

PLUGIN_FILE = re.compile(r"(?P<file>[^\n]+\.py):(?P<cls>[A-Za-z_]\w*)")
"""How a plugin in a file is named."""
PREFIX = "posttrain_local_"
"""What the names of modules begin with that were loaded by path."""


class PluginFiles:
    """The files that plugins are named in, each with a short name: `my_rewards.py`.

    A short name is as much of the end of the path as tells the file from the others.
    """

    def __init__(self) -> None:
        self.paths: dict[str, Path] = {}
        self.used: set[str] = set()
        """Short names of the files that a plugin was taken from."""

    def localised(
        self, values: object, folders: Sequence[Path], given: frozenset[str] = frozenset()
    ) -> object:
        """`values`, nested lists and mappings, with each path of a plugin's file made short.

        A relative path is looked for in `folders`, in their order; one that is in none of them
        stays as it is. So do the short names in `given`.
        """
        if isinstance(values, dict):
            return {key: self.localised(item, folders, given) for key, item in values.items()}
        if isinstance(values, list):
            return [self.localised(item, folders, given) for item in values]
        return self.short(values, folders, given) if isinstance(values, str) else values

    def short(self, text: str, folders: Sequence[Path], given: frozenset[str] = frozenset()) -> str:
        """`text` with a short name in place of the path, if it names a plugin in a file."""
        found = PLUGIN_FILE.fullmatch(text)
        if found is None or found["file"] in given:
            return text
        path = Path(found["file"]).expanduser()
        for folder in folders:
            with contextlib.suppress(OSError):
                if (folder / path).is_file():
                    return f"{self._name((folder / path).resolve())}:{found['cls']}"
        return text

    def _name(self, path: Path) -> str:
        for count in range(1, len(path.parts) + 1):
            name = Path(*path.parts[-count:]).as_posix()
            if self.paths.setdefault(name, path) == path:
                return name
        raise AssertionError("a whole path is the name of one file")


def load_file(path: Path) -> ModuleType:
    """The module in the file at `path`, as the file is now; it is loaded once.

    It can import modules of its folder, as a script can. Raises `ConfigError` for a file that
    cannot be loaded, with the line.
    """
    path = path.resolve()
    name = _module_name(path)
    known = _FILES.get(name)
    _FILES[name] = path
    if known is not None:
        if known.parent != path.parent:  # what it imports later is found where it is kept now
            if str(known.parent) in _ADDED:
                _ADDED.remove(str(known.parent))
                with contextlib.suppress(ValueError):  # somebody else took it off
                    sys.path.remove(str(known.parent))
            _add_to_path(path.parent)
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path, loader=_Uncached(name, str(path)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _beside(path):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # somebody else's code: a sentence says what it raised
        del sys.modules[name], _FILES[name]
        raise ConfigError(_failure(path, error)) from error
    return module


def _module_name(path: Path) -> str:
    """The name of the module that the file at `path` is at present."""
    return f"{PREFIX}{re.sub(r'[^A-Za-z0-9_]', '_', path.stem)}_{local_source(path)[:12]}"


def file_of(module: str) -> Path | None:
    """The file of a module that was loaded by path, or the last copy of it; None for any other."""
    return _FILES.get(module)


_FILES: dict[str, Path] = {}
_ADDED: set[str] = set()
"""Folders that are on `sys.path` because of a file in them."""


def _add_to_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
        _ADDED.add(str(folder))


class _Uncached(SourceFileLoader):
    """Leaves no bytecode next to the file, and reads none: two edits in a second are two edits."""

    def path_stats(self, path: str) -> Mapping[str, object]:
        raise OSError


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[None]:
    """Modules next to `path` come before all others while it is loaded, and last later on.

    A module of the same name from elsewhere keeps its place among the loaded modules. One that
    belongs to the file is imported again, now or later: it may have been edited.
    """
    folder = path.parent
    own = {
        Path(name).parts[0].partition(".")[0] for name, _ in files_of(path) if name[-3:] == ".py"
    }
    names = own | {each.stem for each in folder.glob("*.py")}
    names |= {each.parent.name for each in folder.glob("*/__init__.py")}
    names = {n for n in names - {OWN, *sys.stdlib_module_names} if not n.startswith("__")}
    hidden = {
        name: (module, _is_in(folder, module))
        for name, module in sys.modules.items()
        if name.partition(".")[0] in names
    }
    for name in hidden:
        del sys.modules[name]
    without_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.dont_write_bytecode = without_bytecode
        sys.path.remove(str(folder))
        _add_to_path(folder)
        for name, (module, is_inside) in hidden.items():
            if not is_inside:
                sys.modules[name] = module
            elif name.partition(".")[0] not in own:
                sys.modules.setdefault(name, module)


def _is_in(folder: Path, module: ModuleType) -> bool:
    """Whether a module, or the first folder of a namespace, lies in `folder`."""
    place = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), "")
    return folder in Path(place).parents


def _failure(path: Path, error: BaseException) -> str:
    """One sentence for a file that could not be loaded: the line, what was raised, what to do."""
    first = next(iter(causes(error)))
    line: object = ""
    if isinstance(first, SyntaxError) and first.filename == str(path):
        line, what = first.lineno, f"{type(first).__name__}: {first.msg}"
    else:
        frames = traceback.extract_tb(first.__traceback__)
        line = next((f.lineno for f in reversed(frames) if f.filename == str(path)), "")
        what = f"{type(first).__name__}: {' '.join(str(first).split())[:300]}".rstrip(": ")
    fix = "correct it"
    if isinstance(first, ModuleNotFoundError):
        beside = [each.stem for each in path.parent.glob("*.py")]
        hint = nearest(str(first.name), beside)
        fix = f"install it, or put it next to the file{hint}"
    return f"{path}{f':{line}' if line else ''} cannot be loaded: {what}; {fix}"


def places(files: Mapping[str, Path]) -> dict[str, str]:
    """Where each file lies in a folder of copies, by short name: files of one folder in one."""
    folders = list(dict.fromkeys(path.parent for path in files.values()))
    names: dict[Path, str] = {}
    for folder in folders:
        stem = re.sub(r"[^A-Za-z0-9_.-]", "_", folder.name) or "files"
        taken = set(names.values())
        names[folder] = stem if stem not in taken else f"{stem}_{len(names) + 1}"
    return {name: f"{names[path.parent]}/{path.name}" for name, path in files.items()}


def copy_files(files: Mapping[str, Path], folder: Path) -> dict[str, Path]:
    """Copy each file and what belongs to it to its place below `folder`; the copies by short name.

    Raises `ResourceError` where that fails, or where a file was edited since it was loaded.
    """
    found = {}
    for name, place in places(files).items():
        source, copy = files[name], folder / place
        try:
            for relative, path in files_of(source):
                target = copy.parent / relative
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
        except OSError as error:
            raise ResourceError(
                f"cannot copy {source}, which the run uses, to {copy}: {error.strerror or error}"
            ) from error
        if _module_name(copy) not in _FILES:
            raise ResourceError(f"{source} was edited while the run began; start the run again")
        found[name] = copy
    return found
