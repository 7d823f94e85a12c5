"""Where MLflow keeps its data: opening a store, making the local database, ending dead runs."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import mlflow
import requests
from mlflow import MlflowClient
from mlflow.entities import Metric, Run, RunStatus
from mlflow.exceptions import MlflowException
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from sqlalchemy.exc import SQLAlchemyError

from posttrain.core.errors import ResourceError, RunError
from posttrain.core.runtime.files import create_database
from posttrain.core.runtime.processes import is_left_behind, life, life_name, owner
from posttrain.core.tracking.journal import JournalRow, read_journal
from posttrain.core.tracking.metric_names import HEADLINES
from posttrain.core.tracking.writer import reason

SQLITE = "sqlite:///"
SCHEMA = Path(__file__).with_name("mlflow_schema.sql")
TAG_STAGE = "posttrain.stage"
TAG_KIND = "posttrain.kind"
TAG_CACHED_FROM = "posttrain.cached_from"
TAG_OWNER = "posttrain.process"
TAG_ALIVE = "posttrain.alive"
TAG_JOURNAL = "posttrain.journal"
TAG_REQUEST = "posttrain.request"
"""The placeholder that a run or model had before MLflow gave it an id."""
START_S = 8.0
PROBE_TIMEOUT_S = 3.0
HTTP_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
"""What waits for MLflow is the spool; each request gives up soon. MLflow's default is 307 s."""
_reached: set[str] = set()
_REFUSED_LOGIN = re.compile(
    r"error code 40[13]\b|PERMISSION_DENIED|UNAUTHENTICATED|not authenticated", re.IGNORECASE
)
_TAKEN = re.compile(r"unique constraint|unique violation|duplicate (key|entry)", re.IGNORECASE)
MAX_METRICS_PER_CALL = 1000  # MLflow's own limit for one log_batch


@contextmanager
def explained(what: str, uri: str) -> Iterator[None]:
    """Turn an MLflow or database error into one sentence for the user."""
    try:
        yield
    except (MlflowException, SQLAlchemyError) as error:
        if _REFUSED_LOGIN.search(str(error)):
            raise ResourceError(
                f"MLflow at {without_password(uri)} refuses the login ({reason(error)}): set "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, "
                "to those of a user who may write there, then run the same command again"
            ) from error
        raise ResourceError(
            f"MLflow at {uri} could not {what}: {reason(error)}; check that it can be reached, has "
            "room and is of this version of MLflow (`mlflow db upgrade URI` moves an older one)"
        ) from error


def connect(uri: str) -> MlflowClient:
    """A client of the tracking store and registry at `uri`, or `ResourceError` if it cannot open.

    Also makes `uri` MLflow's process-wide default: external models and `models:/` sources of the
    registry are looked up there and nowhere else, and a default of MLflow's own would quietly
    create a second database in the working directory.
    """
    # MLflow logs the traceback of an error of the database before it raises it; we tell the user.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    for name, value in HTTP_SETTINGS.items():
        os.environ.setdefault(name, value)
    if uri not in _reached:
        _require_answer(uri)
        _reached.add(uri)
    with explained("be opened", uri):
        mlflow.set_tracking_uri(uri)
        mlflow.set_registry_uri(uri)
        return MlflowClient(tracking_uri=uri, registry_uri=uri)


def upsert(write: Callable[[], object]) -> None:
    """Write a tag, an alias or a data set that other processes may write at the same time.

    MLflow looks for the row and then inserts it, so the later of two is refused; called again, it
    finds the row.
    """
    try:
        write()
    except MlflowException as error:
        if not _TAKEN.search(str(error)):
            raise
        write()


def _require_answer(uri: str) -> None:
    """Raise `ResourceError` unless an HTTP server answers within `START_S`."""
    deadline = time.monotonic() + START_S
    while (why := no_health(uri)) is not None:
        if time.monotonic() > deadline - PROBE_TIMEOUT_S:
            raise ResourceError(
                f"MLflow at {without_password(uri)} cannot be reached ({why}): check the address "
                "in MLFLOW_TRACKING_URI, and start the server (`posttrain services up`), then run "
                "the same command again"
            )
        time.sleep(0.5)


def without_password(uri: str) -> str:
    """The address without a user's name and password, which belong into no file."""
    parts = urlsplit(uri)
    if not uri.startswith(("http://", "https://")) or "@" not in parts.netloc:
        return uri
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def no_health(uri: str) -> str | None:
    """Why no server answers at `uri`; None if one does, or if it is not HTTP."""
    if not uri.startswith(("http://", "https://")):
        return None
    try:
        # Whatever the answer is, the address is right; errors are for the request that follows.
        answer = requests.get(f"{uri.rstrip('/')}/health", timeout=PROBE_TIMEOUT_S)
    except requests.RequestException as error:
        return "no answer in time" if isinstance(error, requests.Timeout) else "no connection"
    return f"HTTP status {answer.status_code}" if answer.status_code >= 500 else None


def requested_run(client: MlflowClient, request: str) -> str:
    """The id of the run that had the placeholder `request`; empty if there is none."""
    experiments = [item.experiment_id for item in client.search_experiments()]
    found = client.search_runs(experiments, f"tags.`{TAG_REQUEST}` = '{request}'", max_results=1)
    return str(found[0].info.run_id) if found else ""


def artifact_root(uri: str) -> Path | None:
    """The folder for artifacts next to a SQLite database; None lets a server decide."""
    if not uri.startswith(SQLITE):
        return None
    return Path(uri.removeprefix(SQLITE)).resolve().parent / "artifacts"


def prepare_database(home: Path) -> str:
    """Make `home`/mlflow/mlflow.db and its artifact folder if missing; return the SQLite URI.

    Several processes may call it at once. Raises `ResourceError` when the folder cannot be written
    or the file is not a database.
    """
    folder = home.resolve() / "mlflow"
    database = folder / "mlflow.db"
    try:
        (folder / "artifacts").mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not database.exists():
                _create(database, folder / "artifacts")
        with database.open("rb") as stream:
            is_sqlite = stream.read(15) == b"SQLite format 3"
    except OSError as error:
        raise ResourceError(
            f"cannot create the MLflow database {database}: {error.strerror}; check that the "
            "folder is writable and its disk has room, or choose another --home"
        ) from error
    if not is_sqlite:
        raise ResourceError(
            f"{database} is not a SQLite database: move it away, and a new one is made"
        )
    return f"{SQLITE}{database}"


def _create(database: Path, artifacts: Path) -> None:
    """Fill a private file and rename it, so that a killed start leaves no half database.

    A version of MLflow that is not the schema file's migrates from nothing, for 2 s.
    """
    partial = database.with_name(f".partial-{uuid.uuid4().hex[:12]}.db")
    with explained("create its tables", f"{SQLITE}{database}"):
        create_database(partial, SCHEMA, "mlflow")
        store = SqlAlchemyStore(f"{SQLITE}{partial}", artifacts.as_uri())  # type: ignore[no-untyped-call]
        store.engine.dispose()
    os.replace(partial, database)


def process_tags(folder: Path | None, journal: Path | None = None) -> dict[str, str]:
    """Tags by which a later run finds out that this process died.

    `folder` is where it keeps the file that it holds locked for life, in sight of later runs.
    """
    alive = None if folder is None else life(folder.resolve())
    tags = {TAG_OWNER: owner(), TAG_ALIVE: alive, TAG_JOURNAL: journal}
    return {name: str(value) for name, value in tags.items() if value is not None}


def kill_running(uri: str) -> list[str]:
    """Mark runs that a dead process left RUNNING as KILLED; returns their ids.

    What their journals hold and MLflow does not is written first, so nothing measured is lost.
    Runs whose process may be alive, in another container or on another machine, are left alone,
    and so are those without our tags.
    """
    client = connect(uri)
    with explained("end runs of dead processes", uri):
        experiments = [item.experiment_id for item in client.search_experiments()]
        running = client.search_runs(
            experiments, f"attributes.status = 'RUNNING' and tags.`{TAG_OWNER}` != ''"
        )
        dead = [run for run in running if is_left_behind(run.data.tags[TAG_OWNER], _alive(run))]
        for run in dead:
            run_id, tags = run.info.run_id, run.data.tags
            rows: list[JournalRow] = []
            try:
                rows = read_journal(Path(tags[TAG_JOURNAL])) if TAG_JOURNAL in tags else []
            except RunError as error:  # of another run: it must not keep this one from starting
                note = f"Its last metrics were not recovered: {error}"
                client.set_tag(run_id, "mlflow.note.content", note)
            recover_rows(client, run_id, rows)
            client.set_terminated(
                run_id,
                RunStatus.to_string(RunStatus.KILLED),
                end_time=rows[-1].time_ms if rows else None,
            )
        for path in {path for run in dead if (path := _alive(run)) is not None}:
            path.unlink(missing_ok=True)
    return [run.info.run_id for run in dead]


def _alive(run: Run) -> Path | None:
    """The file that the process of a run holds locked; None for any other file that a tag names."""
    path = Path(run.data.tags.get(TAG_ALIVE, ""))
    return path if path.name == life_name(run.data.tags[TAG_OWNER]) else None


def recover_rows(client: MlflowClient, run_id: str, rows: Sequence[JournalRow]) -> None:
    """Write the journal rows that the run does not hold yet.

    A row is written whole or not at all, so one key tells; taking the most common ones, few
    histories are read. (MLflow ignores exact duplicates, but takes minutes over thousands.)
    """
    counts = Counter(name for row in rows for name in row.metrics)
    telling = [max(row.metrics, key=counts.__getitem__) for row in rows]
    stored = {
        (name, point.step, point.timestamp)
        for name in set(telling)
        for point in client.get_metric_history(run_id, name)
    }
    missing = [
        row
        for name, row in zip(telling, rows, strict=True)
        if (name, row.step, row.time_ms) not in stored
    ]
    log_rows(client, run_id, missing)


def entities_of(row: JournalRow, model_id: str = "") -> list[Metric]:
    """What MLflow gets of a row: every metric, and the headlines under their second names."""
    again = {HEADLINES[name]: v for name, v in row.metrics.items() if name in HEADLINES}
    return [
        Metric(name, value, row.time_ms, row.step, model_id=model_id or None)
        for name, value in row.metrics.items()
    ] + [Metric(name, value, row.time_ms, row.step) for name, value in again.items()]


def log_rows(client: MlflowClient, run_id: str, rows: Iterable[JournalRow]) -> None:
    metrics = [entity for row in rows for entity in entities_of(row)]
    for begin in range(0, len(metrics), MAX_METRICS_PER_CALL):
        client.log_batch(run_id, metrics=metrics[begin : begin + MAX_METRICS_PER_CALL])
