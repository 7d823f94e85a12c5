"""What the shell offers after Tab: configs, runs, stages, plugins, stage kinds and sections.

A completion must not import what a command imports: names are read from folders and from source
text, since loading the plugins takes seconds.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path

import typer

GROUP = "posttrain.plugins"
PLUGIN_NAME = re.compile(r"^ +name(?:, \w+)* = \"([^\"]+)\"", re.MULTILINE)
STAGE = re.compile(
    r"^class \w+\((?:BuiltIn|Stage)\[\w+\]\):\n(?:(?!class ).*\n)*?"
    r"    name(?:, \w+)* = \"([^\"]+)\"",
    re.MULTILINE,
)
SECTION = re.compile(
    r"^    (\w+): (?:tuple\[|dict\[\w+, )?(?:\w+Section|OptimizerField|DataSource|EarlyStopping)"
    r"(?:(?:, \.\.\.)?\])?(?: \| None)? = ",
    re.MULTILINE,
)
PACKAGE = Path(__file__).parents[2]
"""The folder of `core`, `plugins` and `pipelines`, in a checkout and in a wheel alike."""


def configs(incomplete: str) -> list[str]:
    """Names of shipped configs, YAML files, and folders that may hold some."""
    folder = PACKAGE / "configs"
    shipped = [*folder.glob("*.yaml"), *folder.glob("*/*.yaml")]
    names = [path.relative_to(folder).with_suffix("").as_posix() for path in shipped]
    return [*_starting(names, incomplete), *files(incomplete, (".yaml", ".yml"))]


def files(incomplete: str, suffixes: tuple[str, ...]) -> list[str]:
    """Files with these endings, and folders, that begin as the text does."""
    head, tail = os.path.split(incomplete)
    found = []
    try:
        with os.scandir(head or ".") as entries:
            for entry in entries:
                if entry.name.startswith(tail) and (tail.startswith(".") or entry.name[0] != "."):
                    name = os.path.join(head, entry.name)
                    if entry.is_dir():
                        found.append(f"{name}/")
                    elif entry.name.endswith(suffixes):
                        found.append(name)
    except OSError:
        return []
    return sorted(found)


def runs(ctx: typer.Context, incomplete: str) -> list[str]:
    """Ids of the runs in the home, the newest first."""
    try:
        found = [path for path in _runs(ctx).iterdir() if path.is_dir()]
        newest = sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:
        return []
    return _starting([path.name for path in newest], incomplete)


def stages(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of the stages of the runs that stand on the line, else of all runs."""
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or ""
    words = tuple(word for word in line.split() if len(word) > 1)
    known = list(_runs(ctx).glob("*/config.yaml"))
    named = [path for path in known if any(path.parent.name.startswith(word) for word in words)]
    names: set[str] = set()
    for config in named or known:
        try:
            below = config.read_text("utf-8").split("\nstages:\n", 1)[1]
        except (OSError, UnicodeDecodeError, IndexError):
            continue
        own = re.split(r"^\S", below, maxsplit=1, flags=re.MULTILINE)[0]
        names.update(re.findall(r"^  (\w+):", own, re.MULTILINE))
    return _starting(sorted(names), incomplete)


def plugins(incomplete: str) -> list[str]:
    """Names of the plugins of every installed package."""
    return _starting(_in_plugins(PLUGIN_NAME), incomplete)


def plugin_kinds(incomplete: str) -> list[str]:
    """Kinds of plugins."""
    text = "".join(path.read_text("utf-8") for path in _source("contracts"))
    return _starting(sorted(set(re.findall(r"^    kind = \"(\w+)\"", text, re.M))), incomplete)


def kinds(incomplete: str) -> list[str]:
    """Kinds of stages."""
    return _starting(_in_plugins(STAGE), incomplete)


def sections(incomplete: str) -> list[str]:
    """Names of config sections."""
    text = "".join(path.read_text("utf-8") for path in _source("config"))
    return _starting(sorted(set(SECTION.findall(text))), incomplete)


def _runs(ctx: typer.Context) -> Path:
    home = ctx.params.get("home") or os.environ.get("POSTTRAIN_HOME") or ".posttrain"
    return Path(home) / "runs"


def _source(package: str) -> list[Path]:
    return sorted((PACKAGE / "core" / package).glob("*.py"))


def _in_plugins(pattern: re.Pattern[str]) -> list[str]:
    """What the pattern finds in the source of all plugins."""
    names: set[str] = set()
    for place in _plugin_places():
        for path in place.rglob("*.py") if place.is_dir() else [place]:
            try:
                names.update(pattern.findall(path.read_text("utf-8")))
            except (OSError, UnicodeDecodeError):
                continue
    return sorted(names)


def _plugin_places() -> list[Path]:
    """Folders and files of the entry points' modules, without importing them."""
    found = [PACKAGE / "core" / "training" / "adamw.py"]  # registered from there
    for entry_point in entry_points(group=GROUP):
        package, *below = entry_point.module.split(".")
        if package == "posttrain":
            place = PACKAGE.joinpath(*below)
            found.append(place if place.is_dir() else place.with_suffix(".py"))
            continue
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError):
            continue
        if spec is not None and spec.origin is not None:
            origin = Path(spec.origin)
            found.append(origin.parent if origin.name == "__init__.py" else origin)
    return found


def _starting(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
