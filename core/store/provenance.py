"""Which code, libraries and machine computed a stage."""

from __future__ import annotations

import getpass
import importlib.metadata
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from posttrain.core.runtime.machine import processor_name
from posttrain.core.store.identity import source_digest

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


def environment(device: torch.device, dtype: torch.dtype, engine: str) -> dict[str, str]:
    """By name, as people would say it; `engine` is the one that samples."""
    on_gpu = device.type == "cuda"
    return {
        "posttrain": importlib.metadata.version("posttrain"),
        "posttrain's source": source_digest()[:12],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "machine": platform.node(),
        "processor": processor_name(),
        "device": torch.cuda.get_device_name(device) if on_gpu else device.type,
        "precision": str(dtype).removeprefix("torch."),
        "CPU threads": str(torch.get_num_threads()),
        "engine": engine,
    }


def with_plugins(
    found: Mapping[str, str], plugins: Sequence[tuple[str, str, str]]
) -> dict[str, str]:
    """`found`, and the origin of each plugin (kind, name, origin)."""
    return {**found, **{f"{kind} plugin {name}": origin for kind, name, origin in plugins}}


def differences(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """One sentence's part for each difference: `torch 2.15.0 then, 2.14.1 now`."""
    names = [*then, *(name for name in now if name not in then)]
    changed = [name for name in names if then.get(name) != now.get(name)]
    return [
        f"{name} {then.get(name, 'was not there')} then, {now.get(name, 'not there')} now"
        for name in changed
    ]
