"""The source of a plugin: the files that its class is made of, and their digest.

A version says nothing of an installed package that is edited in place, nor of a file next to the
config, so a stage's identity holds this digest too.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import os.path
import re
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import all_suffixes
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path

from posttrain.core.errors import ResourceError

OWN = "posttrain"
"""The root of modules whose digest is in every identity already."""
LARGE = 1 << 20
"""Bytes above which a package's file that is not Python counts with its size alone."""
_LEFT_OUT = {"__pycache__", ".git", ".mypy_cache", ".ruff_cache", ".pytest_cache"}
_COMPILED = {".pyc", ".pyo"}
_TEXT = re.compile(r"""(["'])([^"'\\\n]{1,200})\1""")


def plugin_source(cls: type, package: str) -> str:
    """sha256 over the source of `cls`, which the distribution `package` offers; "" for our own.

    That is its module's whole package, or the module, and the modules and packages next to it
    that it imports; of plugins that it derives from too. Of a class that was typed into a notebook
    it is the class alone. Raises `ResourceError` for a file that cannot be read.
    """
    modules = {base.__module__ for base in cls.__mro__ if getattr(base, "kind", None)}
    foreign = sorted(name for name in modules if name.partition(".")[0] != OWN)
    places = dict.fromkeys(place for name in foreign if (place := _place(name)) is not None)
    digests = [_digest(*place, package) for place in places]
    if foreign and not places:
        digests = [hashlib.sha256(_typed(cls).encode()).hexdigest()]
    return hashlib.sha256("\n".join(digests).encode()).hexdigest() if digests else ""


def _typed(cls: type) -> str:
    """The methods and attributes of a class that was typed into a notebook, which has no file."""
    parts = [cls.__qualname__]
    for name, value in vars(cls).items():
        function = getattr(value, "__func__", value)
        if inspect.isfunction(function):
            try:
                parts.append(inspect.getsource(function))
            except OSError:
                code = function.__code__
                parts.append(f"{name} {code.co_code.hex()} {code.co_names} {code.co_consts}")
        elif isinstance(value, str | int | float | bool | tuple) and not name.startswith("__"):
            parts.append(f"{name} {value!r}")
    return "\n".join(parts)


@functools.cache
def _digest(place: Path, root: Path, package: str) -> str:
    """Digest of every file of a package or module, and of what it imports from `root`."""
    return _digest_of(_files(place, root, _neighbours(root, package)))


def local_source(path: Path) -> str:
    """sha256 over a plugin's file that is in no package, and what belongs to it (`files_of`)."""
    return _digest_of(files_of(path), whole=True)


def files_of(path: Path) -> list[tuple[str, Path]]:
    """(name from the folder on, path) of a plugin's file and of what belongs to it, each once.

    That is what it imports from its own folder, and the files there that texts in it name, or in
    folders that texts in it name (`HERE / "data" / "words.txt"`).
    """
    files = dict(_files(path, path.parent, None))
    for module in [each for each in files.values() if each.suffix == ".py"]:
        texts = {Path(text) for _, text in _TEXT.findall(_read(module))}
        inside = [text for text in texts if not text.is_absolute() and ".." not in text.parts]
        folders = [path.parent, module.parent]
        for folder in folders:  # which grows
            for named in (folder / text for text in inside):
                if os.path.isfile(named):
                    files.setdefault(named.relative_to(path.parent).as_posix(), named)
                elif os.path.isdir(named) and named not in folders and not named.is_symlink():
                    folders.append(named)
    return sorted(files.items())


def _digest_of(files: Iterable[tuple[str, Path]], *, whole: bool = False) -> str:
    """One digest of all contents; with `whole`, of large files too."""
    digest = hashlib.sha256()
    for name, path in sorted(files):
        try:
            now = path.stat()
            if path.suffix == ".py" or now.st_size <= LARGE:
                content = hashlib.sha256(path.read_bytes()).hexdigest()
            else:
                size = now.st_size
                content = _of_large(path, size, now.st_mtime_ns) if whole else str(size)
        except OSError as error:
            raise ResourceError(
                f"cannot read {path}, which is part of a plugin: {error.strerror}; its digest "
                "decides whether a stage is computed again"
            ) from error
        digest.update(f"{name} {content}\n".encode())
    return digest.hexdigest()


@functools.cache
def _of_large(path: Path, size: int, changed_ns: int) -> str:
    """Digest of a file, which is read again only when its size or time of change is another."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _files(
    place: Path, root: Path, neighbours: frozenset[str] | None
) -> Iterator[tuple[str, Path]]:
    """(name from `root` on, path) of each file, once; `neighbours` as of `_beside`."""
    waiting, seen = [place], {place}
    while waiting:
        for path in _below(waiting.pop()):
            yield path.relative_to(root).as_posix(), path
            for name in _imported(path, root) if path.suffix == ".py" else ():
                found = _beside(root, name, neighbours)
                if found is not None and seen.isdisjoint((found, *found.parents)):
                    seen.add(found)
                    waiting.append(found)


def _place(name: str) -> tuple[Path, Path] | None:
    """The folder of the package or the file of the module that holds the module `name`, and the
    folder that its name begins in.

    None for one that came from no file. A namespace has no file of its own: what counts is the
    first package or module below it.
    """
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        module = sys.modules.get(".".join(parts[:count]))
        file = getattr(module, "__file__", None)
        if file is not None:
            path = Path(file).absolute()
            path = path.parent if path.stem == "__init__" else path
            return path, path.parents[count - 1]
    return None


def _below(place: Path) -> list[Path]:
    """The file itself, or every file of a package but caches and links."""
    if not place.is_dir():
        return [place] if place.is_file() else []
    return [
        path
        for path in place.rglob("*")
        if path.suffix not in _COMPILED and not _LEFT_OUT & set(path.parts) and path.is_file()
    ]


def _imported(path: Path, root: Path) -> Iterator[str]:
    """Full names of what a module imports, wherever in it, by `import_module` as well."""
    try:
        nodes = ast.walk(ast.parse(_read(path), str(path)))
    except (SyntaxError, ValueError, RecursionError):
        return  # loading it says why
    package = path.relative_to(root).parts[:-1]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            base = [*above, node.module] if node.module else above
            yield from (".".join([*base, each.name]) for each in node.names)
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func).rpartition(".")[2]
            name = getattr(node.args[0], "value", None)
            if called in ("import_module", "__import__") and isinstance(name, str):
                yield name.lstrip(".")


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""  # reading it for the digest says why


def _beside(root: Path, name: str, allowed: frozenset[str] | None) -> Path | None:
    """The package or module in `root` that `name` is of, if it belongs to the plugin.

    A folder without `__init__.py` is a namespace: what counts is the package or module below it.
    """
    first, *_ = parts = name.split(".")
    if first == OWN or (allowed is not None and first not in allowed):
        return None
    here = root
    for part in parts:
        here = here / part
        if os.path.isfile(here / "__init__.py"):
            return here
        for suffix in all_suffixes():
            if os.path.isfile(f"{here}{suffix}"):
                return Path(f"{here}{suffix}")
    return None


def _neighbours(folder: Path, package: str) -> frozenset[str] | None:
    """What in `folder` may belong to the plugin: the files of its distribution in a folder of
    installed packages, and anything elsewhere (None).
    """
    if not any(folder.glob("*.dist-info")):
        return None
    try:
        files = Distribution.from_name(package).files or ()
    except (PackageNotFoundError, ValueError):
        files = ()
    return frozenset(file.parts[0].removesuffix(".py") for file in files)
