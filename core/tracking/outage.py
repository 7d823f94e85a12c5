"""What a run does when MLflow is away: the writer with its spool, and sending what was left."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.tracking._tracking_service.utils import get_default_host_creds
from mlflow.utils.rest_utils import http_request_safe

from posttrain.core.errors import PosttrainError, ResourceError
from posttrain.core.store.locks import locked
from posttrain.core.tracking import mlflow_store as store
from posttrain.core.tracking.mlflow_operations import Sender
from posttrain.core.tracking.writer import Spool, Writer, lock_path, reason, unreachable

FOLDER = "mlflow-waiting"
PATIENCE_S = 30.0
"""How long the end of a run waits for an MLflow that is away."""
SEND_COMMAND = "posttrain send"


def open_writer(
    client: MlflowClient, uri: str, experiment_id: str, run_id: str, journal: Path | None
) -> Writer:
    """The writer of a run; its spool is in the run's folder, or a temporary one without `journal`."""
    root = Path(tempfile.mkdtemp()) if journal is None else journal / run_id
    about = {"uri": without_password(uri), "experiment_id": experiment_id, "run_id": run_id}
    spool = Spool(root / FOLDER, about)
    sender = Sender(client, uri, experiment_id)
    return Writer(without_password(uri), sender, spool, probe_of(client, uri, experiment_id))


def probe_of(client: MlflowClient, uri: str, experiment_id: str) -> Callable[[], bool]:
    """Whether MLflow answers, its database included: one short request."""

    def ask() -> bool:
        if not uri.startswith(("http://", "https://")):
            client.get_experiment(experiment_id)
            return True
        http_request_safe(
            get_default_host_creds(uri),
            "/api/2.0/mlflow/experiments/get",
            "GET",
            params={"experiment_id": experiment_id},
            max_retries=0,
            timeout=store.PROBE_TIMEOUT_S,
        )
        return True

    return ask


def without_password(uri: str) -> str:
    """The address without a user's name and password, which belong into no file."""
    parts = urlsplit(uri)
    if not uri.startswith(("http://", "https://")) or "@" not in parts.netloc:
        return uri
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def left_behind(count: int, uri: str, folder: Path) -> str:
    """What a run says that ends before MLflow is back."""
    home = folder.parents[2]
    return (
        f"MLflow at {without_password(uri)} is still away: the results are complete on disk, and "
        f"{count} records wait in {folder}; the next command of this home sends them, or "
        f"`{SEND_COMMAND} --home {home}`"
    )


def waiting_folders(runs: Path) -> list[Path]:
    return sorted(runs.glob(f"*/{FOLDER}"))


class _Busy(Exception):
    """Another process sends this spool, or its run is still alive."""


def send_waiting(runs: Path, uri: str | None = None) -> list[str]:
    """Send what runs of this home could not; returns a sentence for each spool.

    With `uri` only what belongs there. Spools of living runs, and those that another process sends,
    are left alone. A server that is away is one sentence, not an error.
    """
    return [said for folder in waiting_folders(runs) if (said := _send(folder, uri))]


def _send(folder: Path, uri: str | None) -> str:
    try:
        with _own(folder):
            return _send_held(folder, uri) if folder.is_dir() else ""
    except _Busy:
        return ""
    except (OSError, ValueError, KeyError) as error:
        return f"what waits for MLflow in {folder} cannot be read ({error}): move it away"


@contextmanager
def _own(folder: Path) -> Iterator[None]:
    def give_up() -> None:
        raise _Busy

    with locked(lock_path(folder), check=give_up):
        yield


def _send_held(folder: Path, uri: str | None) -> str:
    about = json.loads((folder / "about.json").read_text())
    given = uri or os.environ.get("MLFLOW_TRACKING_URI") or ""
    target = given if without_password(given) == about["uri"] else about["uri"]
    if uri is not None and target != uri:
        return ""
    spool, name = Spool.found(folder, about), str(about["run_id"])[:12]
    count = spool.waiting
    shown = f"{count} records of run {name}"
    try:
        client = store.connect(target)
        sender = Sender(client, target, about["experiment_id"])
        refused = _send_all(spool, sender)
    except (PosttrainError, MlflowException) as error:
        return f"{shown} wait for MLflow in {folder}: {reason(error)}"
    spool.remove()
    if not count:
        return ""
    kept = f"; {refused} were refused and are kept in {folder}" if refused else ""
    return f"{shown} were sent to MLflow at {about['uri']}{kept}"


def _send_all(spool: Spool, sender: Sender) -> int:
    """Send in order; returns how many operations MLflow refused. Raises when it is away."""
    refused = 0
    while spool.waiting:
        operation, made = spool.first(), ""
        try:
            made = sender(spool.resolved(operation), True)
        except Exception as error:
            if unreachable(error):
                raise ResourceError(f"it cannot be reached ({reason(error)})") from error
            spool.refuse(operation, reason(error))
            refused += 1
        spool.done(operation, made)
    return refused
