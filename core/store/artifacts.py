"""Artifacts: what stages make and read, each with a digest, never half-written.

A stage writes into a private `.partial-*` folder. The manifest, with a digest for every file, is
written last and the folder is renamed into place, so a folder with its final name is complete.
One process at a time computes a stage of one identity; others wait for what it makes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from posttrain.core.errors import ResourceError, RunError
from posttrain.core.runtime.files import WrongContent, put_in_place, read_json
from posttrain.core.runtime.processes import hold, is_left_behind, owner
from posttrain.core.store.locks import locked
from posttrain.core.types import Artifact as Artifact
from posttrain.core.types import ArtifactKind

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
ADAPTER = "adapter"
"""Where the adapter of a trained model lies, in the model's folder."""
ADAPTER_CONFIG = f"{ADAPTER}/adapter_config.json"

NEVER = "never computed"
_PARTIAL = ".partial-"

StageStatus = Literal["ran", "cached", "resumed"]


@dataclass(frozen=True, slots=True)
class StageResult:
    """What a finished stage hands on: artifacts by role and final metrics."""

    name: str
    kind: str
    status: StageStatus
    artifacts: tuple[Artifact, ...]
    metrics: Mapping[str, float]
    seconds: float
    mlflow_run_id: str = ""

    def artifact(self, kind: ArtifactKind) -> Artifact:
        """The artifact of this kind, or `RunError` naming what there is."""
        for item in self.artifacts:
            if item.kind == kind:
                return item
        made = [item.kind for item in self.artifacts]
        raise RunError(f"stage '{self.name}' made {made}, no '{kind}'")


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a pipeline run leaves behind, and where to look at it."""

    run_id: str
    status: str
    stages: Mapping[str, StageResult]
    mlflow_uri: str
    mlflow_run_id: str
    mlflow_experiment_id: str
    prefect_flow_run_id: str
    home: Path
    seconds: float
    warnings: tuple[str, ...] = field(default=())
    baselines: Mapping[str, str] = field(default_factory=dict)
    """The evaluation that another one is compared with, by the other's name."""


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


def check_free_disk(folder: Path, needed_bytes: float, reserve_gb: float, what: str) -> None:
    """Raise `ResourceError` unless `needed_bytes` fit on `folder`'s disk in addition to the
    reserve.
    """
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(existing).free
    needed = needed_bytes + reserve_gb * 1e9
    if free < needed:
        raise ResourceError(
            f"not enough disk space for {what}: {free / 1e9:.1f} GB free at {existing}, "
            f"{needed / 1e9:.1f} GB needed (limits.min_free_gb {reserve_gb:g} included); "
            "free some space, or choose another --home"
        )


def make_folder(folder: Path) -> None:
    """Make a folder that results go to, or raise `ResourceError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(
            f"cannot make the folder {folder}: {error.strerror}; choose another --home or --store"
        ) from error


def _lock_of(partial: Path) -> Path:
    return partial.with_name(f"{partial.name}.lock")


class ArtifactStore:
    """Finished stages under `root`, each in a folder named after its stage and identity."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._held: dict[Path, int | None] = {}

    def folder(self, stage: str, identity: str) -> Path:
        folder = self.root / f"{stage}-{identity[:16]}"
        if folder.parent != self.root:
            raise RunError(f"'{stage}' with identity '{identity}' is not a stage of {self.root}")
        return folder

    @contextmanager
    def computing(
        self,
        stage: str,
        identity: str,
        *,
        waits: Callable[[str], None] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> Iterator[None]:
        """Be the only process that computes this stage; `waits` and `check` as of `locked`."""
        lock = self.root / f".lock-{stage}-{identity[:16]}"
        with locked(lock, waits=waits, check=check):
            yield

    def begin(self, stage: str) -> Path:
        """A private folder for a stage to write into, with its owner in its name.

        A lock file next to it is held until the folder is committed or discarded.
        """
        folder = self.root / f"{_PARTIAL}{stage}-{uuid.uuid4().hex[:8]}@{owner()}"
        make_folder(self.root)
        self._held[folder] = hold(_lock_of(folder))
        folder.mkdir()
        return folder

    def remove_partial(self) -> None:
        """Remove private folders that killed runs left behind.

        Those of runs that go on, in this container or another, or on another machine that shares
        the store, are not touched.
        """
        for folder in self.root.glob(f"{_PARTIAL}*@*@*"):
            if folder.is_dir() and is_left_behind(folder.name.partition("@")[2], _lock_of(folder)):
                self.discard(folder)

    def discard(self, partial: Path) -> None:
        shutil.rmtree(partial, ignore_errors=True)
        self._let_go(partial)

    def _let_go(self, partial: Path) -> None:
        _lock_of(partial).unlink(missing_ok=True)
        descriptor = self._held.pop(partial, None)
        if descriptor is not None:
            os.close(descriptor)

    def commit(
        self,
        partial: Path,
        result: StageResult,
        identity: str,
        why: Mapping[str, str],
        files: Mapping[str, str],
    ) -> Path:
        """Write the manifest (last) and rename `partial` into place; returns the final folder."""
        final = self.folder(result.name, identity)
        try:
            inside(partial, ".")
        except ValueError as error:
            raise RunError(
                f"stage '{result.name}' cannot be stored: {error}; a stage, or a plugin that it "
                "uses, has to copy files instead of linking to them"
            ) from error
        moved = [
            asdict(item) | {"uri": Path(item.uri).relative_to(partial).as_posix()}
            for item in result.artifacts
        ]
        manifest = {
            "version": MANIFEST_VERSION,
            "identity": identity,
            "parts": dict(why),
            "stage": result.name,
            "kind": result.kind,
            "metrics": dict(result.metrics),
            "seconds": result.seconds,
            "mlflow_run_id": result.mlflow_run_id,
            "artifacts": moved,
            "files": dict(files),
        }
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=2))
        # In place of one that `--no-cache` computed again, or whose files are damaged.
        put_in_place(partial, final)
        self._let_go(partial)
        return final

    def lookup(
        self, stage: str, identity: str, *, compare: bool = True
    ) -> tuple[StageResult | None, str]:
        """The finished stage of this identity, or None and why it cannot be used.

        Unless `compare` is false every file is read and compared with its digest.
        """
        folder = self.folder(stage, identity)
        if not (folder / MANIFEST).is_file():
            return None, NEVER
        manifest = read_manifest(folder)
        if manifest is None:
            return None, f"damaged: {folder / MANIFEST} is not what was written"
        if manifest.get("version") != MANIFEST_VERSION or manifest.get("identity") != identity:
            return None, "its manifest is of another version"
        try:
            inside(folder, ".")
            paths = [str(inside(folder, item["uri"])) for item in manifest["artifacts"]]
        except ValueError as error:
            return None, f"damaged: {error}"
        if compare and tree_digests(folder) != manifest["files"]:
            return None, f"damaged: files under {folder} differ from their digests"
        artifacts = tuple(
            Artifact(**(item | {"uri": path, "parents": tuple(item["parents"])}))
            for path, item in zip(paths, manifest["artifacts"], strict=True)
        )
        return (
            StageResult(
                name=stage,
                kind=manifest["kind"],
                status="cached",
                artifacts=artifacts,
                metrics=manifest["metrics"],
                seconds=manifest["seconds"],
                mlflow_run_id=manifest["mlflow_run_id"],
            ),
            "cached",
        )

    def previous_parts(self, stage: str) -> list[dict[str, str]]:
        """The named identity parts of all finished runs of this stage, newest first."""
        folders = sorted(
            self.root.glob(f"{stage}-*/{MANIFEST}"), key=lambda p: p.stat().st_mtime, reverse=True
        )
        manifests = (read_manifest(path.parent) for path in folders)
        return [m["parts"] for m in manifests if m is not None and m.get("stage") == stage]


class _Row(BaseModel):
    kind: ArtifactKind
    uri: str
    digest: str
    stage: str
    parents: list[str]
    mlflow_run_id: str
    mlflow_model_id: str


class _Manifest(BaseModel):
    version: int
    identity: str
    parts: dict[str, str]
    stage: str
    kind: str
    metrics: dict[str, float]
    seconds: float
    mlflow_run_id: str
    artifacts: list[_Row]
    files: dict[str, str]


def read_manifest(folder: Path) -> dict[str, Any] | None:  # Any: JSON
    """The manifest of a finished stage, or None when it is not one."""
    try:
        found: dict[str, Any] = read_json(folder / MANIFEST, _Manifest)
    except WrongContent:
        return None
    return found
