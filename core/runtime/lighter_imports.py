"""Work that libraries do while they are loaded and that a run needs none of, or only once.

transformers 5 looks up the distribution of every installed package (0.3 s), reads the files of all
its models twice (0.3 s each time), and loads scikit-learn and most of SciPy for a function of
assisted generation and one of object detection (0.8 s). The results here are the same.

Modules are changed as they are loaded, so `install` itself loads nothing. What a version of the
library does otherwise stays as it is.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

SCAN, FETCH = "create_import_structure_from_path", "fetch__all__"


def distributions_of_packages() -> dict[str, list[str]]:
    """As `importlib.metadata.packages_distributions`, for packages with a Python file.

    That one makes a path of each of 50,000 files, and parses the description of each distribution.
    """
    from importlib import metadata

    found: dict[str, list[str]] = {}
    for distribution in metadata.distributions():
        head = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
        name = re.search(r"^Name:[ \t]*(\S+)", head, re.MULTILINE)
        packages = (distribution.read_text("top_level.txt") or "").split()
        if not packages and (record := distribution.read_text("RECORD")):
            files = (line.partition(".py,")[0] for line in record.splitlines() if ".py," in line)
            packages = list(dict.fromkeys(file.partition("/")[0] for file in files))
        if name is not None:
            for package in packages:
                found.setdefault(package, []).append(name[1])
    return found


@contextmanager
def _scanning_once(module: ModuleType) -> Iterator[None]:
    """Around `transformers.utils.import_utils`: its cache of 128 folders holds all 500."""
    from importlib import metadata

    before = metadata.packages_distributions
    metadata.packages_distributions = distributions_of_packages
    try:
        yield
    finally:
        metadata.packages_distributions = before
    scan, names = (vars(module).get(name) for name in (SCAN, FETCH))
    if scan is not None and hasattr(scan, "cache_info"):
        vars(module)[SCAN] = cache(scan.__wrapped__)
    if names is not None:  # of a file's text it wants the end
        vars(module)[FETCH] = lambda text: names(text[text.rfind("\n__all__") + 1 :])


@contextmanager
def _loaded_later(name: str, module: ModuleType) -> Iterator[None]:
    """Around a module that takes functions from the module `name`: that loads at the first call.

    Where it is loaded already nothing is changed.
    """
    if name in sys.modules:
        yield
        return
    sys.modules[name] = _Later(name)
    try:
        yield
    finally:
        del sys.modules[name]


@contextmanager
def _caller_at_once(module: ModuleType) -> Iterator[None]:
    """Around `torch._library.utils`: its `FILE:LINE` of a caller is in the caller's frame."""
    yield

    def get_source(stacklevel: int) -> str:
        frame = sys._getframe(stacklevel)
        return f"{frame.f_code.co_filename}:{frame.f_lineno}"

    if "get_source" in vars(module):
        vars(module)["get_source"] = get_source


class _Later(ModuleType):
    """Has functions of a module that call those of the real one."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:  # Any: a function of any library
            return getattr(importlib.import_module(self.__name__), name)(*args, **kwargs)

        return call


Around = Callable[[ModuleType], AbstractContextManager[None]]

CHANGED: dict[str, Around] = {
    "torch._library.utils": _caller_at_once,
    "transformers.utils.import_utils": _scanning_once,
    "transformers.generation.candidate_generator": partial(_loaded_later, "sklearn.metrics"),
    "transformers.loss.loss_utils": partial(_loaded_later, "scipy.optimize"),
}


class _Loader(Loader):
    """Runs a module's code inside a context; to everyone else the module has its own loader."""

    def __init__(self, own: Loader, around: Around) -> None:
        self.own, self.around = own, around

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.own
        if module.__spec__ is not None:
            module.__spec__.loader = self.own
        with self.around(module):
            self.own.exec_module(module)


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in CHANGED:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, CHANGED[name])
        return spec


def install() -> None:
    """Let this process load these modules so; may be called twice."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
