"""This machine's cache of a store with a URL: stages fetched into it, and pushed from it."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from posttrain.core.errors import ResourceError, RunError
from posttrain.core.runtime.files import WrongContent, of_shape, put_in_place, write_text
from posttrain.core.store import urls
from posttrain.core.store.lease import leased
from posttrain.core.store.locks import locked
from posttrain.core.store.manifests import (
    MANIFEST,
    Manifest,
    read_manifest,
    tree_digests,
)
from posttrain.core.store.pushing import Pusher
from posttrain.core.store.remote import Remote, StoreAway

STAGES, MODELS, LEASES = "stages", "models", "leases"
"""Where the store has finished stages, models from outside, and who computes what."""
WAITING = ".waiting"
"""Folder with the names of stages that are still to be pushed."""


class Mirror:
    """The cache `root` of the store at `url`. Names are those of stages' folders.

    Where the store is away, what is on this machine counts, and `news` says so.
    """

    def __init__(self, root: Path, url: str) -> None:
        self.root, self.url = root, url
        self.remote = Remote(url)
        self.pusher = Pusher(url)

    def leased(
        self, name: str, waits: Callable[[str], None], check: Callable[[], None]
    ) -> AbstractContextManager[None]:
        """Be the only machine that computes the stage, as `core.store.lease` can do it."""
        tell = self.pusher.tell
        return leased(self.remote, f"{LEASES}/{name}", waits=waits, check=check, note=tell)

    def manifest(self, name: str) -> dict[str, Any] | None:  # Any: JSON
        """That of the store, if it has the stage."""
        try:
            return self._kept(name)
        except StoreAway as error:
            self._only_here(error)
            return None

    def manifests(self, start: str) -> list[tuple[str, dict[str, Any], float]]:
        """Name, manifest and time (seconds) of stages that begin with `start`, not on this machine.

        A request for each; those that are here are not asked for.
        """
        found = []
        try:
            for key, written in self.remote.found(STAGES).items():
                name, _, rest = key.partition("/")
                here = (self.root / name / MANIFEST).is_file()
                if rest == MANIFEST and name.startswith(start) and not here:
                    if (kept := self._kept(name)) is not None:
                        found.append((name, kept, written))
        except StoreAway as error:
            self._only_here(error)
        return found

    def update(self, name: str) -> bool:
        """Fetch a stage that the store has and this machine has not, or not so.

        Returns whether it is here and was compared with its digests; one that only this machine has
        is pushed. Raises `DamagedObject`.
        """
        try:
            return self._update(name)
        except StoreAway as error:
            self._only_here(error)
            return False

    def _update(self, name: str) -> bool:
        if self._mark(name).exists():
            return False  # made here, and not pushed yet
        kept = self._kept(name)
        if kept is not None:
            self._fetch(f"{STAGES}/{name}", kept, self.root / name)
        elif (self.root / name / MANIFEST).is_file():
            self.push(name)
        return kept is not None

    def fetched(self, name: str) -> Path:
        """The folder of the stage `name`, brought here if only the store has it.

        Raises `StoreAway`, or `DamagedObject`.
        """
        if not (self.root / name / MANIFEST).is_file():
            self._update(name)
        return self.root / name

    def push(self, name: str) -> None:
        """Give the store a finished stage, in the background; it waits on disk until it is done."""
        urls.mark(self.root)
        self._mark(name).parent.mkdir(parents=True, exist_ok=True)
        write_text(self._mark(name), self.url)
        self.pusher.add(f"stage {name}", lambda: self._push(name))

    def ensure(self, name: str) -> None:
        """Return when the store has the finished stage; raises `StoreAway` while it cannot."""
        if self._mark(name).exists() or self._kept(name) is None:
            self._push(name)

    def push_waiting(self) -> None:
        """Push what earlier commands on this machine could not."""
        for mark in sorted((self.root / WAITING).glob("[!.]*")):
            self.push(mark.name)

    def _push(self, name: str) -> None:
        folder, key = self.root / name, f"{STAGES}/{name}"
        manifest = read_manifest(folder)
        if manifest is not None:
            before = self._kept(name) or {"files": {}}
            sources = {digest: folder / path for path, digest in manifest["files"].items()}
            self.remote.put_files(f"{key}/files", sources, again=True)
            self.remote.put_json(f"{key}/{MANIFEST}", manifest)
            old = set(before["files"].values()) - set(sources)
            self.remote.remove([f"{key}/files/{digest}" for digest in old])
        self._mark(name).unlink(missing_ok=True)

    def push_model(self, folder: Path, digest: str) -> None:
        """Give the store a model that no stage made, once; returns when it is there."""
        key = f"{MODELS}/{digest}"
        if self.remote.get_json(f"{key}/{MANIFEST}") is None:
            found = tree_digests(folder).items()
            files = {path: each for path, each in found if "/." not in f"/{path}"}
            sources = {each: folder / path for path, each in files.items()}
            self.remote.put_files(f"{key}/files", sources)
            self.remote.put_json(f"{key}/{MANIFEST}", {"files": files})

    def fetched_model(self, digest: str) -> Path:
        """The model of `push_model`, on this machine."""
        key, folder = f"{MODELS}/{digest}", self.root / MODELS / digest
        if not folder.is_dir():  # it has its name once it is whole
            kept = self.remote.get_json(f"{key}/{MANIFEST}")
            if not isinstance(kept, dict) or not isinstance(kept.get("files"), dict):
                raise RunError(f"the store {self.url} has no model of digest {digest[:12]}")
            self._fetch(key, kept, folder)
        return folder

    def fetched_files(self, key: str, files: Mapping[str, str], place: str) -> Path:
        """A folder of the cache with `files`, by relative path with digest, from below `key`."""
        folder = self.root / place
        if not folder.is_dir():
            self._fetch_below(key, {"files": dict(files)}, folder)
        return folder

    def news(self) -> list[str]:
        """What the user has to know, since the last call."""
        return self.pusher.news()

    def settle(self, patience_s: float) -> str:
        """Wait until all is pushed; a sentence if the store was away for `patience_s`."""
        left = self.pusher.wait(patience_s)
        if not left:
            return ""
        return (
            f"the store {self.url} is still away: the results are complete in {self.root}, and "
            f"{len(left)} wait to be sent ({', '.join(left[:3])}); the next run with this store "
            f"sends them, or `posttrain send --store {self.url}`"
        )

    def _kept(self, name: str) -> dict[str, Any] | None:
        found = self.remote.get_json(f"{STAGES}/{name}/{MANIFEST}")
        try:
            of_shape(found, Manifest)
        except WrongContent:
            return None
        return dict(found)

    def _mark(self, name: str) -> Path:
        return self.root / WAITING / name

    def _only_here(self, error: ResourceError) -> None:
        self.pusher.tell(f"{error}: what is on this machine is used, and nothing else is known")

    def _fetch(self, key: str, manifest: Mapping[str, Any], final: Path) -> None:
        self._fetch_below(f"{key}/files", manifest, final)

    def _fetch_below(self, key: str, manifest: Mapping[str, Any], final: Path) -> None:
        """Files into the cache, whole and verified or not at all, one process at a time."""
        urls.mark(self.root)
        final.parent.mkdir(parents=True, exist_ok=True)
        with locked(final.with_name(f".fetch-{final.name}.lock")):
            if final.is_dir() and tree_digests(final) == manifest["files"]:
                return  # it is here already
            partial = final.with_name(f".fetch-{final.name}")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            try:
                self.remote.get_files(key, manifest["files"], partial)
                (partial / MANIFEST).write_text(json.dumps(manifest, indent=2))
                put_in_place(partial, final)
            finally:
                shutil.rmtree(partial, ignore_errors=True)


@functools.cache
def mirror_at(root: Path, url: str) -> Mirror:
    """The cache `root` of `url`; there is one in this process, with one that pushes."""
    return Mirror(root, url)


def mirror_of(root: Path) -> Mirror | None:
    """What the folder of a store is, if the store has a URL."""
    url = urls.url_of(root)
    return mirror_at(root, url) if url else None
