"""Digests of files, and the manifest that says which a finished stage has."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from posttrain.core.runtime.files import WrongContent, read_json
from posttrain.core.types import ArtifactKind

MANIFEST = "manifest.json"
ADAPTER = "adapter"
"""Where the adapter of a trained model lies, in the model's folder."""
ADAPTER_CONFIG = f"{ADAPTER}/adapter_config.json"
ATTESTATION = "attestation.json"
"""What an exported model says of its own origin; no part of the model."""


def file_digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def tree_digests(folder: Path) -> dict[str, str]:
    """sha256 of every file below `folder` but the manifest, by relative path."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    return {path.relative_to(folder).as_posix(): file_digest(path) for path in files}


def inside(folder: Path, relative: str) -> Path:
    """`folder / relative`; raises `ValueError` for a path that leaves the folder.

    That is an absolute one, one with `..`, and one that is, goes through or holds a symbolic link.
    """
    path = Path(relative)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"'{relative}' is not a path below {folder}")
    found = folder / path
    steps = [folder / Path(*path.parts[: n + 1]) for n in range(len(path.parts))]
    below = found.rglob("*") if found.is_dir() and not found.is_symlink() else ()
    link = next((step for step in (*steps, *below) if step.is_symlink()), None)
    if link is not None:
        raise ValueError(f"{link} is a symbolic link, which could lead out of {folder}")
    return found


def digests_below(files: Mapping[str, str], path: str) -> dict[str, str]:
    """The part of `files` (of `tree_digests`) that is the file or folder at relative `path`."""
    if path in files:
        return {Path(path).name: files[path]}
    start = f"{path}/"
    return {n.removeprefix(start): digest for n, digest in files.items() if n.startswith(start)}


def combine_digests(digests: Mapping[str, str]) -> str:
    """One sha256 over names and digests, independent of their order."""
    lines = "\n".join(f"{name} {digest}" for name, digest in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def model_digest(files: Mapping[str, str]) -> str:
    """The digest of a model from those of its files.

    An adapter's config is left out: it says where its base lies, which every home has in another
    place.
    """
    return combine_digests({n: digest for n, digest in files.items() if n != ADAPTER_CONFIG})


class Row(BaseModel):
    kind: ArtifactKind
    uri: str
    digest: str
    stage: str
    parents: list[str]
    mlflow_run_id: str
    mlflow_model_id: str


class Manifest(BaseModel):
    version: int
    identity: str
    parts: dict[str, str]
    stage: str
    kind: str
    metrics: dict[str, float]
    seconds: float
    mlflow_run_id: str
    artifacts: list[Row]
    files: dict[str, str]


def read_files(folder: Path) -> dict[str, str] | None:
    """The digests in the manifest of a stage or model; None without one."""
    try:
        found = json.loads((folder / MANIFEST).read_bytes())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, dict) else None


def read_manifest(folder: Path) -> dict[str, Any] | None:  # Any: JSON
    """The manifest of a finished stage, or None when it is not one."""
    try:
        found: dict[str, Any] = read_json(folder / MANIFEST, Manifest)
    except WrongContent:
        return None
    return found
