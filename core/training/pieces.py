"""Pieces of a checkpoint that ranks on several machines have put into a store with a URL.

Where the tensors of an optimizer would lie, the checkpoint has a file `pieces.json` with their
digests, by path. Whoever reads them fetches them into the cache of its machine, once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from posttrain.core.errors import RunError
from posttrain.core.runtime.files import WrongContent, read_json
from posttrain.core.store import urls
from posttrain.core.store.manifests import combine_digests, tree_digests
from posttrain.core.store.mirror import Mirror, mirror_of

PIECES = "pieces.json"


class _Pieces(BaseModel):
    url: str
    key: str
    files: dict[str, str]


def put_pieces(mirror: Mirror, key: str, folder: Path) -> dict[str, str]:
    """Give the store the files below `folder`; their digests by relative path."""
    files = tree_digests(folder)
    mirror.remote.put_files(key, {digest: folder / name for name, digest in files.items()})
    return files


def write_pieces(folder: Path, url: str, key: str, files: Mapping[str, str]) -> None:
    """Say in `folder` where the pieces lie."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PIECES).write_text(json.dumps({"url": url, "key": key, "files": dict(files)}))


def read_pieces(path: Path) -> dict[str, str]:
    """The digests in a `pieces.json`, by path."""
    files: dict[str, str] = _read(path)["files"]
    return files


def _read(path: Path) -> dict[str, Any]:  # Any: as `_Pieces` has it
    try:
        return dict(read_json(path, _Pieces))
    except WrongContent as error:
        raise RunError(f"{path} does not say which pieces a checkpoint has ({error})") from error


def with_pieces(folder: Path) -> Path:
    """`folder`, or the one on this machine with the pieces that it names."""
    if not (folder / PIECES).is_file():
        return folder
    about = _read(folder / PIECES)
    return fetched_pieces(about["url"], about["key"], about["files"])


def fetched_pieces(url: str, key: str, files: Mapping[str, str]) -> Path:
    """A folder on this machine with the pieces, fetched by one process and verified."""
    mirror = mirror_of(urls.cached(url))
    assert mirror is not None
    return mirror.fetched_files(key, files, f"pieces/{combine_digests(files)[:32]}")
