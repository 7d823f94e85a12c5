"""A stage's checkpoints in a store with a URL, where another machine can go on from them.

`checkpoints/STAGE/` has the files of all of a stage's checkpoints by digest, and for each complete
one `step-000010.json`, written last. With a checkpoint goes what lies next to it: the answers that
the stage learns from, the record and the evidence of its steps.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from posttrain.core.errors import ResourceError
from posttrain.core.runtime.files import WrongContent, of_shape, put_in_place
from posttrain.core.store.manifests import file_digest, tree_digests
from posttrain.core.store.mirror import Mirror
from posttrain.core.store.remote import DamagedObject
from posttrain.core.training.checkpoint import (
    KEPT,
    complete_checkpoints,
    step_folder,
    step_of,
)
from posttrain.core.training.pieces import PIECES, read_pieces

CHECKPOINTS = "checkpoints"
_MANIFEST = re.compile(r"step-([0-9]{6,})\.json")


class _Saved(BaseModel):
    """The files of a checkpoint, of what lies next to it, and pieces that ranks have put there."""

    step: int
    files: dict[str, str]
    extras: dict[str, str]
    pieces: list[str]


class RemoteCheckpoints:
    """Those of the stage whose folder is `root`; `keep` of them stay. `warn` is given sentences."""

    def __init__(self, mirror: Mirror, root: Path, keep: int, warn: Callable[[str], None]) -> None:
        self._mirror, self._remote = mirror, mirror.remote
        self._root, self._keep, self._warn = root, keep, warn
        self.key = f"{CHECKPOINTS}/{root.name}"

    def push(self, folder: Path) -> None:
        """Send a checkpoint that was just written, in the background; then drop older ones."""
        extras = self._extras()
        self._mirror.pusher.add(f"checkpoint {folder.name}", partial(self._push, folder, extras))

    def _extras(self) -> dict[str, Path | bytes]:
        """Files next to the checkpoints. Lines are still added to some: they are read now."""
        found: dict[str, Path | bytes] = {}
        for path in sorted(self._root.rglob("*")) if self._root.is_dir() else ():
            relative = path.relative_to(self._root)
            own = relative.parts[0].startswith(("step-", "damaged-", ".", KEPT))
            if path.is_file() and not own and not path.name.startswith("."):
                grows = path.suffix in (".json", ".jsonl")
                found[relative.as_posix()] = path.read_bytes() if grows else path
        return found

    def _push(self, folder: Path, extras: Mapping[str, Path | bytes]) -> None:
        try:
            files = tree_digests(folder)
            named = {name: _digest(source) for name, source in extras.items()}
            sources = {digest: folder / name for name, digest in files.items()}
            sources_of_extras = {named[name]: source for name, source in extras.items()}
            self._remote.put_files(f"{self.key}/files", {**sources_of_extras, **sources})
        except FileNotFoundError:
            return  # a newer one has taken its place
        if not folder.is_dir():
            return
        pieces = [digest for path in folder.rglob(PIECES) for digest in read_pieces(path).values()]
        saved = _Saved(step=step_of(folder), files=files, extras=named, pieces=pieces)
        self._remote.put_json(f"{self.key}/{folder.name}.json", saved.model_dump())
        self._trim()

    def _steps(self) -> list[str]:
        """Names of the complete checkpoints there, newest first."""
        names = (name for name in self._remote.found(self.key) if _MANIFEST.fullmatch(name))
        return sorted(names, key=lambda name: int(name[5:-5]), reverse=True)

    def _saved(self, name: str) -> dict[str, Any] | None:  # Any: JSON
        found = self._remote.get_json(f"{self.key}/{name}")
        try:
            of_shape(found, _Saved)
        except WrongContent:
            return None
        return dict(found)

    def _trim(self) -> None:
        names = self._steps()
        staying = {d for name in names[: self._keep] for d in _digests(self._saved(name))}
        for name in names[self._keep :]:
            going = _digests(self._saved(name)) - staying
            self._remote.remove([f"{self.key}/{name}"])
            self._remote.remove([f"{self.key}/files/{digest}" for digest in going])

    def bring(self) -> None:
        """Fetch the newest whole checkpoint, if it is newer than those of this machine."""
        here = [step_of(folder) for folder in complete_checkpoints(self._root)]
        try:
            for name in self._steps():
                step = int(name[5:-5])
                if here and here[0] >= step:
                    return
                saved = self._saved(name)
                if saved is not None and self._fetched(step, saved):
                    return
        except ResourceError as error:
            self._mirror.pusher.tell(f"{error}: checkpoints of other machines are not known")

    def _fetched(self, step: int, saved: Mapping[str, Any]) -> bool:
        partial_folder = self._root / f".fetch-{step:06d}"
        shutil.rmtree(partial_folder, ignore_errors=True)
        partial_folder.mkdir(parents=True)
        try:
            whole, extras = partial_folder / "whole", partial_folder / "extras"
            for folder, files in ((whole, saved["files"]), (extras, saved["extras"])):
                folder.mkdir()
                self._remote.get_files(f"{self.key}/files", files, folder)
            for name in saved["extras"]:
                (self._root / name).parent.mkdir(parents=True, exist_ok=True)
                (extras / name).replace(self._root / name)
            put_in_place(whole, step_folder(self._root, step))
        except DamagedObject as error:
            self._warn(f"the checkpoint of step {step} in the store is damaged ({error})")
            return False
        finally:
            shutil.rmtree(partial_folder, ignore_errors=True)
        return True

    def forget(self) -> None:
        """Remove all of them, in the background: the stage is done, or begins again."""
        self._mirror.pusher.add(f"removal of {self.key}", self._forget)

    def _forget(self) -> None:
        names = self._remote.found(self.key)
        first = sorted(names, key=lambda name: _MANIFEST.fullmatch(name) is None)
        self._remote.remove([f"{self.key}/{name}" for name in first])


def _digest(source: Path | bytes) -> str:
    return sha256(source).hexdigest() if isinstance(source, bytes) else file_digest(source)


def _digests(saved: Mapping[str, Any] | None) -> set[str]:
    """What a checkpoint holds; nothing of one that cannot be read."""
    if saved is None:
        return set()
    return {*saved["files"].values(), *saved["extras"].values(), *saved["pieces"]}
