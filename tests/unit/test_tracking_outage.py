"""The writer and its spool while MLflow is away: real files, a real kill, a real HTTP server."""

import errno
import json
import os
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from requests import exceptions as http
from sqlalchemy.exc import OperationalError

from posttrain.core.errors import ResourceError, RunError
from posttrain.core.store.locks import locked
from posttrain.core.tracking import mlflow_store
from posttrain.core.tracking.mlflow_operations import Sender
from posttrain.core.tracking.mlflow_tracker import PipelineTracker
from posttrain.core.tracking.outage import send_waiting, waiting_folders
from posttrain.core.tracking.spool import Operation, Spool, lock_path
from posttrain.core.tracking.writer import Writer, unreachable


class Server:
    """Takes operations while it is up; knows what came, and how often."""

    def __init__(self) -> None:
        self.up = True
        self.error: Exception = http.ConnectionError("connection refused")
        self.got: list[object] = []
        self.again: list[bool] = []

    def send(self, operation: Operation, again: bool) -> str:
        if not self.up:
            raise self.error
        self.got.append(operation["n"])
        self.again.append(again)
        return f"id-{operation['n']}"


def writer_to(server: Server, folder: Path, max_waiting: int = 1000) -> Writer:
    return Writer(
        "there",
        server.send,
        Spool(folder / "run" / "mlflow-waiting", {"uri": "there"}),
        lambda: server.up,
        max_waiting=max_waiting,
        probe_s=0.05,
    )


def numbered(n: object) -> Operation:
    return {"op": "n", "what": f"operation {n}", "n": n, "request": "pending-" + "0" * 32}


def test_an_outage_raises_nothing_keeps_everything_on_disk_and_is_sent_in_order(
    tmp_path: Path,
) -> None:
    server = Server()
    writer = writer_to(server, tmp_path)
    writer.submit(numbered(0))
    writer.flush()
    server.up = False
    for n in range(1, 50):
        writer.submit(numbered(n))
    writer.flush()
    assert server.got == [0] and writer.away
    waiting = tmp_path / "run" / "mlflow-waiting" / "operations.jsonl"
    assert [json.loads(line)["n"] for line in waiting.read_text().splitlines()] == [*range(1, 50)]
    assert writer.call(numbered(50)) == "pending-" + "0" * 32
    (away,) = writer.news()
    assert "there cannot be reached: the run goes on" in away and str(waiting.parent) in away
    server.up = True
    assert writer.wait(10)
    writer.submit({**numbered(51), "run": "pending-" + "0" * 32})
    writer.flush()
    assert server.got == [*range(52)]
    assert writer.real("pending-" + "0" * 32) == "id-50"
    time.sleep(0.1)
    (back,) = writer.news()
    assert "answers again" in back
    assert writer.close() == 0 and not waiting.parent.exists()


def test_a_caller_never_waits_for_a_server_that_hangs_and_memory_is_bounded(tmp_path: Path) -> None:
    server, gate = Server(), threading.Event()

    def hang(operation: Operation, again: bool) -> str:
        gate.wait(30)
        return server.send(operation, again)

    spool = Spool(tmp_path / "run" / "mlflow-waiting", {})
    writer = Writer("there", hang, spool, max_waiting=10)
    began = time.monotonic()
    for n in range(95):
        writer.submit(numbered(n))
    assert time.monotonic() - began < 5
    assert spool.waiting >= 80
    gate.set()
    writer.flush()
    assert writer.wait(10) and server.got == [*range(95)]
    assert writer.close() == 0


def test_what_a_server_refuses_is_an_error_and_does_not_hold_up_the_rest(tmp_path: Path) -> None:
    server = Server()
    writer = writer_to(server, tmp_path)
    server.up, server.error = False, MlflowException("no such run", 3)
    writer.submit(numbered(1))
    writer.drain()
    server.up = True
    with pytest.raises(RunError, match="could not record operation 1 .* no such run"):
        writer.submit(numbered(2))
    writer.flush()
    assert server.got == [2] and not writer.away
    writer.close()


def test_an_operation_refused_after_it_went_to_disk_is_an_error_and_the_rest_is_sent(
    tmp_path: Path,
) -> None:
    server, gate = Server(), threading.Event()

    def send(operation: Operation, again: bool) -> str:
        gate.wait(30)
        if operation["n"] == 0:
            raise MlflowException("no such run", 3)
        return server.send(operation, again)

    spool = Spool(tmp_path / "run" / "mlflow-waiting", {})
    writer = Writer("there", send, spool, max_waiting=2)
    asked = threading.Thread(target=writer.call, args=[numbered(0)])
    asked.start()
    time.sleep(0.2)
    for n in range(1, 6):
        writer.submit(numbered(n))
    asked.join(5)
    assert not asked.is_alive(), "it has its placeholder"
    gate.set()
    assert writer.wait(10)
    with pytest.raises(RunError, match="operation 0 .* no such run"):
        writer.flush()
    assert server.got == [1, 2, 3, 4, 5]
    writer.close()


CHILD = """
import os, sys
from pathlib import Path
from requests.exceptions import ConnectionError
from posttrain.core.tracking.spool import Spool
from posttrain.core.tracking.writer import Writer
log = open(sys.argv[2], "a", buffering=1)
up = False
def send(operation, again):
    if not up:
        raise ConnectionError("refused")
    log.write(f"{operation['n']}\\n")
    if operation["n"] == 3:
        os._exit(9)  # it is sent, and not noted
    return ""
writer = Writer("there", send, Spool(Path(sys.argv[1]), {"uri": "there"}), lambda: up, probe_s=0.01)
for n in range(6):
    writer.submit({"op": "n", "what": "n", "n": n})
writer.drain()
up = True
writer.wait(20)
"""


def test_a_kill_between_send_and_record_repeats_one_operation_and_loses_none(
    tmp_path: Path,
) -> None:
    folder, log = tmp_path / "run" / "mlflow-waiting", tmp_path / "sent"
    child = subprocess.run([sys.executable, "-c", CHILD, str(folder), str(log)], timeout=60)
    assert child.returncode == 9
    assert log.read_text().split() == ["0", "1", "2", "3"]
    with (folder / "operations.jsonl").open("a") as stream:
        stream.write('{"op": "n", "cut')  # as a kill in the middle of a write leaves it
    with locked(lock_path(folder)):
        spool, left = Spool.found(folder, {}), []
        while spool.waiting:
            left.append(spool.first()["n"])
            spool.done(spool.first(), "")
        spool.remove()
    assert left == [3, 4, 5], "3 may have been sent before, and its sender knows"
    assert not folder.exists()


@pytest.mark.parametrize(
    "why",
    [MlflowException("failed with error code 401 != 200"), ResourceError("it was deleted")],
)
@pytest.mark.parametrize("before", ["it works", "it is away"])
def test_a_server_that_refuses_everything_ends_no_training_and_is_named(
    tmp_path: Path, why: Exception, before: str
) -> None:
    """A login that is refused, an experiment that is deleted: each operation fails, and so does
    the probe."""
    server = Server()
    refused: list[Exception] = []

    def probe() -> bool:
        if refused:
            raise refused[0]
        return server.up

    def send(operation: Operation, again: bool) -> str:
        if refused:
            raise MlflowException("the run is not active", 3)
        return server.send(operation, again)

    folder = tmp_path / "run" / "mlflow-waiting"
    writer = Writer("there", send, Spool(folder, {"uri": "there"}), probe, probe_s=0.02)
    if before == "it is away":
        server.up = False
        writer.submit(numbered(0))
        writer.flush()
    refused.append(why)
    for n in range(1, 6):
        writer.submit(numbered(n))
        writer.flush()
        time.sleep(0.05)
    assert writer.away and not writer.failed
    (sentence,) = [line for line in writer.news() if "refuses what" in line]
    assert str(why) in sentence and str(folder) in sentence
    refused.clear()
    server.up = True
    assert writer.wait(10)
    assert server.got == [*range(before == "it works", 6)]
    assert writer.close() == 0


def test_a_deleted_experiment_ends_no_training(tmp_path: Path) -> None:
    uri = mlflow_store.prepare_database(tmp_path)
    tracker = start(uri, tmp_path / "runs")
    stage = tracker.stage("rl", "rl", {})
    client = MlflowClient(uri)
    stage.log_step(1, {"lr": 0.1})
    stage.flush()
    client.delete_experiment(tracker.experiment_id)
    for step in (2, 3):
        stage.log_step(step, {"lr": 0.1})
        stage.flush()
    (sentence,) = tracker.news()
    assert "the experiment was deleted" in sentence and "restore" in sentence
    client.restore_experiment(tracker.experiment_id)
    assert tracker.wait(30)
    assert tracker.finish("FINISHED") == ""
    points = client.get_metric_history(stage.run_id, "lr")
    assert sorted(point.step for point in points) == [1, 2, 3]


KILLED = """
import json, os, sys
from pathlib import Path
from requests.exceptions import ConnectionError
from posttrain.core.tracking import outage
from posttrain.core.tracking.writer import Writer
home, when = Path(sys.argv[1]), sys.argv[2]
class Away:
    up = False
    def __call__(self, operation, again):
        if not self.up:
            raise ConnectionError("refused")
        return "m-" + "1" * 32
away = Away()
outage.Sender = lambda *_: away
outage.probe_of = lambda *_: lambda: away.up
outage.Writer = lambda *arguments: Writer(*arguments, probe_s=0.01)
writer = outage.open_writer(None, "http://127.0.0.1:9", "1", "run", home / "runs", home / "store")
def store(name, identity):
    folder = home / "store" / name
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"mlflow_run_id": identity}))
damaged = home / "store" / "damaged"
damaged.mkdir(parents=True)
(damaged / "manifest.json").write_bytes(bytes([255]) + b"{pending-")
(home / "store" / "odd" / "manifest.json").mkdir(parents=True)
made = writer.call({"op": "model", "what": "a model", "request": "pending-" + "a" * 32})
store("sft", made)
away.up = True
assert writer.wait(20)
writer.submit({"op": "n", "what": "n"})
writer.flush()
store("rl", made)  # its stage had the placeholder before MLflow was back
if when == "killed":
    os._exit(9)
writer.close()
"""


@pytest.mark.parametrize("when", ["killed", "ended"])
def test_no_placeholder_stays_when_everything_was_sent(tmp_path: Path, when: str) -> None:
    """A run that is killed after an outage and before its end; then the next command comes."""
    child = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), when], timeout=60)
    assert child.returncode == (9 if when == "killed" else 0)
    if when == "killed":
        assert send_waiting(tmp_path / "runs") == [], "nothing is left to send"
    for stage in ("sft", "rl"):
        manifest = (tmp_path / "store" / stage / "manifest.json").read_text()
        assert json.loads(manifest) == {"mlflow_run_id": "m-" + "1" * 32}
    assert waiting_folders(tmp_path / "runs") == []


def raised(error: Exception, cause: Exception) -> Exception:
    """`error` as it is when it is raised while `cause` is handled."""
    try:
        try:
            raise cause
        except Exception:
            raise error  # noqa: B904
    except Exception as caught:
        return caught


def answered(status: int) -> Exception:
    text = f"API request to endpoint /x failed with error code {status} != 200. Response body: ''"
    return MlflowException(text)


def of_sqlite(text: str) -> Exception:
    cause = OperationalError("INSERT", {}, sqlite3.OperationalError(text))
    return raised(MlflowException(str(cause), 1), cause)


@pytest.mark.parametrize(
    ("error", "away"),
    [
        (raised(MlflowException("failed"), http.ConnectionError("refused")), True),
        (raised(MlflowException("failed"), http.ReadTimeout("slow")), True),
        (raised(MlflowException("failed"), http.ChunkedEncodingError("cut off")), True),
        (raised(MlflowException("failed"), http.RetryError("too many 503 errors")), True),
        (answered(502), True),
        (answered(503), True),
        (answered(404), False),
        (answered(403), False),
        (MlflowException("no such run", 3), False),
        (of_sqlite("database is locked"), True),
        (of_sqlite("database or disk is full"), False),
        (of_sqlite("no such table: runs"), False),
        (OSError(28, "No space left on device"), False),
        (ValueError("x"), False),
    ],
)
def test_what_passes_is_told_from_what_does_not(error: Exception, away: bool) -> None:
    assert unreachable(error) is away


def test_an_operation_that_a_healthy_server_never_takes_is_put_aside(tmp_path: Path) -> None:
    server, tried = Server(), list[object]()

    def send(operation: Operation, again: bool) -> str:
        if operation["n"] == 1:
            tried.append(1)
            raise answered(500)
        return server.send(operation, again)

    spool = Spool(tmp_path / "run" / "mlflow-waiting", {})
    writer = Writer("there", send, spool, probe_s=0.001)
    for n in range(3):
        writer.submit(numbered(n))
    writer.flush()
    assert writer.wait(20)
    assert server.got == [0, 2] and len(tried) == 20
    assert any("does not take operation 1" in sentence for sentence in writer.news())
    assert writer.close() == 0
    assert json.loads((spool.folder / "refused.jsonl").read_text())["n"] == 1


def start(uri: str, runs: Path) -> PipelineTracker:
    return PipelineTracker.start(
        uri=uri,
        experiment="demo",
        run_name="first",
        config_yaml="name: demo\n",
        params={"seed": 0},
        tags={},
        journal=runs,
    )


def test_a_locked_database_is_waited_for(tmp_path: Path) -> None:
    uri = mlflow_store.prepare_database(tmp_path)
    tracker = start(f"{uri}?timeout=0.2", tmp_path / "runs")
    stage = tracker.stage("rl", "rl", {})
    stage.flush()
    other = sqlite3.connect(uri.removeprefix("sqlite:///"), isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    for step in range(1, 4):
        stage.log_step(step, {"lr": step / 10})
    stage.flush()  # MLflow waits for the lock, and gives up
    (away,) = tracker.news()
    assert "cannot be reached" in away
    other.execute("ROLLBACK")
    assert tracker.wait(30)
    assert tracker.finish("FINISHED") == ""
    client = MlflowClient(uri)
    points = client.get_metric_history(stage.run_id, "lr")
    assert sorted(point.step for point in points) == [1, 2, 3]
    assert client.get_run(stage.run_id).info.status == "FINISHED"


def test_every_operation_sent_twice_leaves_the_same(tmp_path: Path) -> None:
    """As after a kill between sending and noting it; what is in MLflow is read back."""
    uri = mlflow_store.prepare_database(tmp_path)
    client = mlflow_store.connect(uri)
    experiment = client.create_experiment("demo", (tmp_path / "artifacts").as_uri())
    sender, parent = Sender(client, uri, experiment), client.create_run(experiment).info.run_id
    run = {"op": "run", "request": "pending-" + "a" * 32, "name": "rl", "began": 1}
    run |= {"tags": {"posttrain.stage": "rl"}, "params": {"steps": 3}}
    run_id = sender(run, False)
    assert sender(run, True) == run_id
    model = {"op": "model", "request": "pending-" + "b" * 32, "runs": [run_id, parent]}
    model |= {"name": "rl", "uri": "/a", "digest": "d1", "step": 0}
    model_id = sender(model, False)
    assert sender(model, True) == model_id
    known = {**model, "op": "known_model", "request": "pending-" + "c" * 32, "digest": "d2"}
    known |= {"model_id": "pending-" + "d" * 32}
    other = sender(known, False)
    assert sender(known, True) == other != model_id
    file = tmp_path / "plot.txt"
    file.write_text("plot")
    dataset = {"name": "d", "digest": "1", "source_type": "local", "source": "{}", "profile": "{}"}
    rows = [(2, 7, {"lr": 0.2}), (3, 8, {"lr": 0.3})]
    for rest in (
        {"op": "metrics", "step": 1, "time_ms": 5, "metrics": {"lr": 0.1}, "model_id": ""},
        {"op": "rows", "rows": rows},
        {"op": "tags", "tags": {"a": "b"}},
        {"op": "text", "text": "hello", "path": "notes/hello.txt"},
        {"op": "file", "file": str(file), "folder": "plots"},
        {"op": "table", "path": "tables/samples/step-000001.json", "rows": [{"x": 1}]},
        {"op": "dataset", "context": "train", "dataset": dataset},
        {"op": "model_input", "model_id": model_id},
        {"op": "end", "status": "FINISHED", "ended": 9},
    ):
        operation = json.loads(json.dumps({**rest, "run": run_id, "what": "it"}))
        sender(operation, False)
        Sender(client, uri, experiment)(operation, True)  # by another process
    found = client.get_run(run_id)
    points = client.get_metric_history(run_id, "lr")
    assert sorted((p.step, p.timestamp, p.value) for p in points) == [
        (1, 5, 0.1),
        (2, 7, 0.2),
        (3, 8, 0.3),
    ]
    assert found.info.status == "FINISHED" and found.info.end_time == 9
    assert found.data.tags["a"] == "b" and found.data.params == {"steps": "3"}
    listed = json.loads(found.data.tags["mlflow.loggedArtifacts"])
    assert [entry["path"] for entry in listed] == ["tables/samples/step-000001.json"]
    assert len(found.inputs.dataset_inputs) == len(found.inputs.model_inputs) == 1
    outputs = sorted(output.model_id for output in found.outputs.model_outputs)
    assert outputs == sorted([model_id, other])
    assert len(client.search_runs([experiment])) == 2
    assert len(client.search_logged_models([experiment])) == 2


@pytest.mark.parametrize("kind", ["model", "known_model"])
def test_a_model_whose_entry_was_cut_off_is_made_ready(tmp_path: Path, kind: str) -> None:
    """Where artifacts go is a file at first: the entry is there, and what it holds is not."""
    uri = mlflow_store.prepare_database(tmp_path)
    client = mlflow_store.connect(uri)
    folder = tmp_path / "artifacts"
    experiment = client.create_experiment("demo", folder.as_uri())
    run_id = client.create_run(experiment).info.run_id
    model = {"op": kind, "request": "pending-" + "b" * 32, "runs": [run_id], "model_id": ""}
    model |= {"name": "rl", "uri": "/a", "digest": "d1", "step": 0}
    folder.write_text("")
    with pytest.raises(OSError, match="artifacts"):
        Sender(client, uri, experiment)(model, False)
    (cut_off,) = client.search_logged_models([experiment])
    assert str(cut_off.status) == "PENDING"
    folder.unlink()
    assert Sender(client, uri, experiment)(model, True) == cut_off.model_id
    (made,) = client.search_logged_models([experiment])
    assert str(made.status) == "READY"
    assert [path.name for path in folder.rglob("MLmodel")] == ["MLmodel"]


class Gone(BaseHTTPRequestHandler):
    """An HTTP server in front of a dead MLflow."""

    status = 503
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(self.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def gone() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Gone) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("kind", ["nothing listens", "nothing answers", "a proxy's error"])
def test_a_server_that_cannot_be_reached_is_refused_quickly_at_the_start(
    tmp_path: Path, gone: str, kind: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        addresses = {
            "nothing listens": "http://me:secret@127.0.0.1:9",
            "nothing answers": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "a proxy's error": gone,
        }
        began = time.monotonic()
        with pytest.raises(ResourceError, match="cannot be reached .*_TRACKING_URI") as refused:
            start(addresses[kind], tmp_path / "runs")
    assert time.monotonic() - began < 12
    assert "secret" not in str(refused.value)
    assert not (tmp_path / "runs").exists()


def test_a_spool_that_cannot_be_sent_stays_and_is_one_sentence(tmp_path: Path, gone: str) -> None:
    runs = tmp_path / "runs"
    spool = Spool(
        runs / "abc" / "mlflow-waiting",
        {"uri": gone, "experiment_id": "1", "run_id": "abc", "artifacts": ""},
    )
    spool.append([numbered(1)])
    assert send_waiting(runs, quiet=False) == [], "its process lives"
    spool.release(last=True)
    (sentence,) = send_waiting(runs, quiet=False)
    assert sentence.startswith("1 records of run abc wait in ") and "is away" in sentence
    assert send_waiting(runs) == []
    for damage in ("{", "[" * 100_000):
        (spool.folder / "operations.jsonl").write_text(f"{damage}\n")
        (sentence,) = send_waiting(runs)
        assert "cannot be read" in sentence
    assert waiting_folders(runs) == [spool.folder]
    assert os.listdir(spool.folder.parent) == ["mlflow-waiting"], "no lock is left"


def test_what_waits_in_a_home_that_cannot_be_written_ends_no_command(
    tmp_path: Path, gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a colleague's home, which others read: `posttrain compare` sends first what waits."""
    runs = tmp_path / "runs"
    about = {"uri": gone, "experiment_id": "1", "run_id": "abc", "artifacts": ""}
    spool = Spool(runs / "abc" / "mlflow-waiting", about)
    spool.append([numbered(1)])
    spool.release(last=True)

    def read_only(*_: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", read_only)
        (sentence,) = send_waiting(runs)
    assert sentence.startswith(f"what waits for MLflow in {spool.folder} cannot be sent from here")
    assert "Read-only file system" in sentence


class Refusing(Gone):
    """A server that is up and takes no login."""

    def do_GET(self) -> None:
        self.status = 200 if self.path == "/health" else 401
        super().do_GET()

    do_POST = do_GET


def test_a_refused_login_is_named_at_the_start_and_loses_nothing_that_waits(
    tmp_path: Path,
) -> None:
    runs = tmp_path / "runs"
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        uri = f"http://127.0.0.1:{server.server_port}"
        about = {"uri": uri, "experiment_id": "1", "run_id": "abc", "artifacts": ""}
        spool = Spool(runs / "abc" / "mlflow-waiting", about)
        spool.append([numbered(1)])
        spool.release(last=True)
        (sentence,) = send_waiting(runs)
        assert "1 records of run abc wait in" in sentence and "refuses (" in sentence
        assert (spool.folder / "operations.jsonl").read_text()
        assert not (spool.folder / "refused.jsonl").exists()
        with pytest.raises(ResourceError, match="refuses the login .*MLFLOW_TRACKING_USERNAME"):
            start(uri, runs)
        server.shutdown()
