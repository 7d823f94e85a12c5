"""The home and the store of a run: whether they can be used, said before anything runs."""

from __future__ import annotations

from pathlib import Path

from posttrain.core.errors import ResourceError
from posttrain.core.store.artifacts import check_folder
from posttrain.core.store.mirror import STAGES, mirror_of

IN_HOME = ("approvals", "checkpoints", "logs", "mlflow", "models", "prefect", "runs")


def require_folders(home: Path, store: Path) -> None:
    """Raise `ResourceError` for a file where a run needs a folder; makes none."""
    for folder in (home, store, *(home / name for name in IN_HOME)):
        check_folder(folder)


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
