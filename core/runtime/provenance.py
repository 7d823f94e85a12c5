"""Which code is running: its commit, where git knows it, and every package beside it."""

from __future__ import annotations

import getpass
import importlib.metadata
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2]
"""The folder of the package that is running."""
GIT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit (40 hex digits), and whether tracked files of the package differ from it."""

    id: str
    changed: bool


@cache
def code_commit(package: Path = PACKAGE) -> Commit | None:
    """The commit that the package's files are checked out from.

    None where git is missing, or does not track the package: an environment inside the checkout of
    another project is not that project's code.
    """
    try:
        _git(package, "ls-files", "--error-unmatch", "core/__init__.py")
        commit = _git(package, "rev-parse", "HEAD").strip()
        changes = _git(package, "status", "--porcelain", "--untracked-files=no", "--", ".")
    except (OSError, subprocess.SubprocessError):
        return None
    return Commit(commit, bool(changes.strip()))


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=GIT_SECONDS,
    )
    return done.stdout


def source_tags() -> dict[str, str]:
    found = {"mlflow.source.name": "posttrain", "mlflow.source.type": "LOCAL"}
    try:
        found["mlflow.user"] = getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        pass
    commit = code_commit()
    if commit is not None:
        found["mlflow.source.git.commit"] = commit.id
        found["mlflow.source.git.dirty"] = str(commit.changed).lower()
    return found


def environment_lock() -> str:
    """Every installed distribution as `name==version`, a line each, as `pip install -r` reads."""
    heads = (_head(distribution) for distribution in importlib.metadata.distributions())
    found = {head["Name"]: head["Version"] for head in heads if head.keys() >= {"Name", "Version"}}
    return "".join(f"{name}=={found[name]}\n" for name in sorted(found, key=str.lower))


def _head(distribution: importlib.metadata.Distribution) -> dict[str, str]:
    """The lines `Key: value` of a distribution's metadata, up to the description.

    `distribution.metadata` parses the description too: a second for 280 packages.
    """
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    lines = text.partition("\n\n")[0].splitlines()
    return dict(line.split(": ", 1) for line in lines if ": " in line)
