"""The store of a run, where it has a URL: whether it can be used, said before anything runs."""

from __future__ import annotations

from pathlib import Path

from posttrain.core.errors import ResourceError
from posttrain.core.store.mirror import STAGES, mirror_of


def require_store(store: Path) -> None:
    """Raise `ResourceError` unless a store with a URL takes and gives objects."""
    if (mirror := mirror_of(store)) is not None:
        mirror.remote.check()


def described(store: Path) -> str:
    """What there is at the URL and on this machine, or what is wrong; empty without a URL."""
    mirror = mirror_of(store)
    if mirror is None:
        return ""
    try:
        names = {name.partition("/")[0] for name in mirror.remote.found(STAGES)}
    except ResourceError as error:
        return f"store: {error}"
    count = "1 finished stage" if len(names) == 1 else f"{len(names)} finished stages"
    return f"store: {mirror.url} answers and has {count}; they are fetched into {store}"
