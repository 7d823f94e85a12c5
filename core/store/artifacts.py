"""Artifacts: what stages make and read, each with a digest, never half-written.

A stage writes into a private `.partial-*` folder. The manifest, with a digest for every file, is
written last and the folder is renamed into place, so a folder with its final name is complete.
One process at a time computes a stage of one identity; others wait for what it makes.

The folder of a store with a URL is this machine's cache of it: finished stages are pushed from
there in the background, and fetched when they are looked up.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from posttrain.core.errors import ResourceError, RunError
from posttrain.core.runtime.files import put_in_place
from posttrain.core.runtime.processes import hold, is_left_behind, owner
from posttrain.core.store import urls
from posttrain.core.store.locks import locked
from posttrain.core.store.manifests import MANIFEST, inside, read_manifest, tree_digests
from posttrain.core.store.mirror import Mirror, mirror_of
from posttrain.core.store.remote import DamagedObject
from posttrain.core.types import Artifact as Artifact
from posttrain.core.types import ArtifactKind

MANIFEST_VERSION = 1

NEVER = "never computed"
_PARTIAL, _LOCK = ".partial-", ".lock"

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


def check_folder(folder: Path) -> None:
    """Raise that `ResourceError` for a folder that a file is in the way of; makes nothing."""
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not there.is_dir():
        make_folder(folder)


def _lock_of(partial: Path) -> Path:
    return partial.with_name(f"{partial.name}{_LOCK}")


class ArtifactStore:
    """Finished stages under `root`, each in a folder named after its stage and identity."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._held: dict[Path, int | None] = {}
        self.mirror: Mirror | None = mirror_of(root)

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
        """Be the only process that computes this stage; `waits` and `check` as of `locked`.

        With a URL, of all machines, as well as a lease can do it (`core.store.lease`).
        """
        name = self.folder(stage, identity).name
        with ExitStack() as held:
            held.enter_context(locked(self.root / f".lock-{name}", waits=waits, check=check))
            if self.mirror is not None:
                told = waits or (lambda _: None)
                held.enter_context(self.mirror.leased(name, told, check))
            yield

    def begin(self, stage: str) -> Path:
        """A private folder for a stage to write into, with its owner in its name.

        A lock file next to it is held until the folder is committed or discarded.
        """
        folder = self.root / f"{_PARTIAL}{stage}-{uuid.uuid4().hex[:8]}@{owner()}"
        make_folder(self.root)
        urls.mark(self.root)
        self._held[folder] = hold(_lock_of(folder))
        folder.mkdir()
        return folder

    def remove_partial(self) -> None:
        """Remove private folders and their locks that killed runs left behind.

        A kill can come when there is one of the two. Those of runs that go on, in this container or
        another, or on another machine that shares the store, are not touched.
        """
        for path in self.root.glob(f"{_PARTIAL}*@*@*"):
            folder = path.with_name(path.name.removesuffix(_LOCK))
            if is_left_behind(folder.name.partition("@")[2], _lock_of(folder)):
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
        if self.mirror is not None:
            self.mirror.push(final.name)
        return final

    def lookup(
        self, stage: str, identity: str, *, compare: bool = True, fetch: bool = True
    ) -> tuple[StageResult | None, str]:
        """The finished stage of this identity, or None and why it cannot be used.

        Unless `compare` is false every file is read and compared with its digest. Of a store with a
        URL the stage is fetched, unless `fetch` is false: then its files may not be here.
        """
        folder = self.folder(stage, identity)
        here = (folder / MANIFEST).is_file()
        if self.mirror is None or (here and not compare):
            return self._local(stage, identity, compare)
        if not fetch and not here:
            kept = self.mirror.manifest(folder.name)
            return (None, NEVER) if kept is None else self._read(stage, identity, kept)
        try:
            compared = fetch and self.mirror.update(folder.name)
        except DamagedObject as error:
            return None, f"damaged: {error}"
        return self._local(stage, identity, compare and not compared)

    def _local(self, stage: str, identity: str, compare: bool) -> tuple[StageResult | None, str]:
        folder = self.folder(stage, identity)
        if not (folder / MANIFEST).is_file():
            return None, NEVER
        manifest = read_manifest(folder)
        if manifest is None:
            return None, f"damaged: {folder / MANIFEST} is not what was written"
        found, why = self._read(stage, identity, manifest)
        if found is not None and compare and tree_digests(folder) != manifest["files"]:
            return None, f"damaged: files under {folder} differ from their digests"
        return found, why

    def _read(
        self,
        stage: str,
        identity: str,
        manifest: Mapping[str, Any],  # Any: JSON
    ) -> tuple[StageResult | None, str]:
        folder = self.folder(stage, identity)
        if manifest.get("version") != MANIFEST_VERSION or manifest.get("identity") != identity:
            return None, "its manifest is of another version"
        try:
            inside(folder, ".")
            paths = [str(inside(folder, item["uri"])) for item in manifest["artifacts"]]
        except ValueError as error:
            return None, f"damaged: {error}"
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
        found = reversed(self.manifests(f"{stage}-"))
        return [m["parts"] for _, m, _ in found if m.get("stage") == stage]

    def manifests(self, start: str = "") -> list[tuple[Path, dict[str, Any], float]]:
        """All finished stages whose names begin with `start`, the oldest first.

        Each with its folder, its manifest, and when that was written (seconds). With a URL a folder
        need not be here: `fetched` brings it.
        """
        found = {}
        for path in self.root.glob(f"{start}*/{MANIFEST}"):
            if (manifest := read_manifest(path.parent)) is not None:
                found[path.parent] = (path.parent, manifest, path.stat().st_mtime)
        if self.mirror is not None:
            for name, manifest, written in self.mirror.manifests(start):
                found.setdefault(self.root / name, (self.root / name, manifest, written))
        return sorted(found.values(), key=lambda row: row[2])

    def fetched(self, stage: str, identity: str) -> Path:
        """As `folder`, brought to this machine if only the URL has it."""
        folder = self.folder(stage, identity)
        return folder if self.mirror is None else self.mirror.fetched(folder.name)

    def push_waiting(self) -> None:
        """Push what earlier runs on this machine could not."""
        if self.mirror is not None:
            self.mirror.push_waiting()

    def news(self) -> list[str]:
        """What the user has to know of the URL's end, since the last call."""
        return [] if self.mirror is None else self.mirror.news()

    def settle(self, patience_s: float) -> str:
        """Wait until all is pushed; a sentence if the URL was away for `patience_s`."""
        return "" if self.mirror is None else self.mirror.settle(patience_s)
