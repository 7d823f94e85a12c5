"""What a run does when MLflow is away: the writer with its spool, and sending what was left."""

from __future__ import annotations

import json
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.utils.credentials import get_default_host_creds
from mlflow.utils.rest_utils import http_request_safe

from posttrain.core.errors import ResourceError
from posttrain.core.store.locks import locked
from posttrain.core.store.manifests import MANIFEST
from posttrain.core.store.mirror import mirror_of
from posttrain.core.tracking import mlflow_store as store
from posttrain.core.tracking.mlflow_operations import Sender
from posttrain.core.tracking.spool import ABOUT, Spool, lock_path
from posttrain.core.tracking.writer import Writer, reason, unreachable

FOLDER = "mlflow-waiting"
PATIENCE_S = 30.0
"""How long the end of a run waits for an MLflow that is away."""
SEND_COMMAND = "posttrain send"


def open_writer(
    client: MlflowClient,
    uri: str,
    experiment_id: str,
    run_id: str,
    journal: Path | None,
    artifacts: Path | None,
) -> Writer:
    """The writer of a run. Its spool is in the run's folder; without `journal` in a temporary one.

    `artifacts` is the store of the stages that the run computes.
    """
    root = Path(tempfile.gettempdir()) / "posttrain-journals" if journal is None else journal
    about = {
        "uri": store.without_password(uri),
        "experiment_id": experiment_id,
        "run_id": run_id,
        "artifacts": "" if artifacts is None else str(artifacts.resolve()),
    }
    spool = Spool(root / run_id / FOLDER, about, _settler(about))
    sender = Sender(client, uri, experiment_id)
    return Writer(store.without_password(uri), sender, spool, probe_of(client, uri, experiment_id))


def _settler(about: Mapping[str, str]) -> Callable[[Mapping[str, str]], None]:
    """Puts ids where the stages are that the run of this spool stored."""
    return (
        partial(write_real_ids, Path(about["artifacts"])) if about["artifacts"] else lambda _: None
    )


def write_real_ids(artifacts: Path, ids: Mapping[str, str]) -> None:
    """Put MLflow's ids into the manifests of stages that were stored with placeholders."""
    if not ids:
        return
    for path in artifacts.glob(f"*/{MANIFEST}"):
        try:
            written = path.read_bytes()  # of any stage in the store, damaged ones among them
        except OSError:
            continue  # removed meanwhile, or not this run's to read
        resolved = written
        for old, new in ids.items():
            resolved = resolved.replace(old.encode(), new.encode())
        if resolved != written:
            partial = artifacts / f".ids-{uuid.uuid4().hex}"  # in the stage it would be damage
            partial.write_bytes(resolved)
            partial.replace(path)
            if (mirror := mirror_of(artifacts)) is not None:
                mirror.push(path.parent.name)


def probe_of(client: MlflowClient, uri: str, experiment_id: str) -> Callable[[], bool]:
    """Whether MLflow answers, its database included: one short request.

    Raises `ResourceError` for a deleted experiment, whose runs take nothing.
    """

    def ask() -> bool:
        if not uri.startswith(("http://", "https://")):
            _require_active(client.get_experiment(experiment_id).lifecycle_stage, experiment_id)
            return True
        answer = http_request_safe(  # type: ignore[no-untyped-call]
            get_default_host_creds(uri),  # type: ignore[no-untyped-call]
            "/api/2.0/mlflow/experiments/get",
            "GET",
            params={"experiment_id": experiment_id},
            max_retries=0,
            timeout=store.PROBE_TIMEOUT_S,
        )
        _require_active(answer.json()["experiment"]["lifecycle_stage"], experiment_id)
        return True

    return ask


def _require_active(stage: str, experiment_id: str) -> None:
    if stage != "active":
        raise ResourceError(
            f"the experiment was deleted: `mlflow experiments restore --experiment-id "
            f"{experiment_id}` brings it back"
        )


def left_behind(count: int, uri: str, folder: Path, refusal: str) -> str:
    """What a run says that ends before MLflow is back, or takes what it records."""
    state = f"still refuses ({refusal})" if refusal else "is still away"
    home = folder.parents[2]
    return (
        f"MLflow at {store.without_password(uri)} {state}: the results are complete on "
        f"disk, and {count} records wait in {folder}; the next command of this home sends them, or "
        f"`{SEND_COMMAND} --home {home}`"
    )


def waiting_folders(runs: Path) -> list[Path]:
    return sorted(runs.glob(f"*/{FOLDER}"))


class _Busy(Exception):
    """Another process sends this spool, or its run is still alive."""


def send_waiting(runs: Path, uri: str | None = None, *, quiet: bool = True) -> list[str]:
    """Send what runs of this home could not; returns a sentence for each spool.

    With `uri` only what belongs there. Spools of living runs, and those that another process sends,
    are left alone. A server that is away is a sentence, or nothing if `quiet`.
    """
    away: set[str] = set()
    said = [_send(folder, uri, away, quiet=quiet) for folder in waiting_folders(runs)]
    return [sentence for sentence in said if sentence]


def _send(folder: Path, uri: str | None, away: set[str], *, quiet: bool) -> str:
    try:
        with _own(folder):
            return _send_held(folder, uri, away, quiet=quiet) if folder.is_dir() else ""
    except _Busy:
        return ""
    except ResourceError as error:  # a home that is only read, or a full disk
        return f"what waits for MLflow in {folder} cannot be sent from here: {error}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return f"what waits for MLflow in {folder} cannot be read ({error}): move it away"


@contextmanager
def _own(folder: Path) -> Iterator[None]:
    def give_up() -> None:
        raise _Busy

    with locked(lock_path(folder), check=give_up):
        yield


def _send_held(folder: Path, uri: str | None, away: set[str], *, quiet: bool) -> str:
    about = json.loads((folder / ABOUT).read_text())
    given = uri or os.environ.get("MLFLOW_TRACKING_URI") or ""
    target = given if store.without_password(given) == about["uri"] else about["uri"]
    if uri is not None and target != uri:
        return ""
    spool = Spool.found(folder, about, _settler(about))
    if not spool.waiting:
        spool.remove()
        return ""
    shown = f"{spool.waiting} records of run {about['run_id'][:12]}"
    if target not in away and store.no_health(target) is not None:
        away.add(target)
    still = "" if quiet else f"{shown} wait in {folder}: MLflow at {about['uri']} is away"
    if target in away:
        return still
    client, experiment = store.connect(target), about["experiment_id"]
    try:
        probe_of(client, target, experiment)()
    except (MlflowException, ResourceError, OSError) as error:
        if unreachable(error):
            return still
        return f"{shown} wait in {folder}: MLflow at {about['uri']} refuses ({reason(error)})"
    refused = _send_all(spool, Sender(client, target, experiment))
    if refused is None:
        return still
    sent = f"{shown} were sent to MLflow at {about['uri']}"
    spool.remove()
    return f"{sent}; {refused} were refused and are kept in {folder}" if refused else sent


def _send_all(spool: Spool, sender: Sender) -> int | None:
    """Send in order; returns how many operations MLflow refused, None when it went away."""
    refused = 0
    while spool.waiting:
        operation, made = spool.first(), ""
        resolved = spool.resolved(operation)
        try:
            made = sender(resolved, True)
        except Exception as error:  # MLflow's own, requests' and databases': the rest is still sent
            if unreachable(error):
                return None
            spool.refuse(operation, reason(error))
            refused += 1
        spool.done(operation, made)
    return refused
