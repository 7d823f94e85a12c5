"""The local MLflow database, and runs whose process was killed: real files, a real SIGKILL."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from posttrain.core.errors import ResourceError
from posttrain.core.runtime.processes import Owner
from posttrain.core.tracking import mlflow_store, registry
from posttrain.core.tracking.journal import JournalRow
from posttrain.core.tracking.mlflow_tracker import (
    PipelineTracker,
    kill_running,
    prepare_database,
)

CHILD = """
import os, signal, sys
from pathlib import Path
from posttrain.core.tracking.mlflow_tracker import PipelineTracker
tracker = PipelineTracker.start(uri=sys.argv[1], experiment="demo", run_name="killed",
    config_yaml="", params={}, tags={}, journal=Path(sys.argv[2]))
stage = tracker.stage("rl", "rl", {})
print(tracker.run_id, stage.run_id, flush=True)
for step in range(1, 301):
    stage.log_step(step, {"lr": step / 10, "reward/mean": 0.5})
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("migrated")
    prepare_database(home)
    return home / "mlflow" / "mlflow.db"


@pytest.fixture
def uri(migrated: Path, tmp_path: Path) -> str:
    (tmp_path / "mlflow").mkdir()
    shutil.copy(migrated, tmp_path / "mlflow" / "mlflow.db")
    return prepare_database(tmp_path)


def start(uri: str, journal: Path | None = None) -> PipelineTracker:
    return PipelineTracker.start(
        uri=uri,
        experiment="demo",
        run_name="second",
        config_yaml="",
        params={},
        tags={},
        journal=journal,
    )


def read(uri: str, run_id: str) -> Run:
    return MlflowClient(tracking_uri=uri).get_run(run_id)


def history(uri: str, run_id: str, key: str) -> list[tuple[int, float]]:
    points = MlflowClient(tracking_uri=uri).get_metric_history(run_id, key)
    return sorted((point.step, point.value) for point in points)


def killed_run(uri: str, journal: Path) -> tuple[str, str]:
    child = subprocess.run(
        [sys.executable, "-c", CHILD, uri, str(journal)],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=120,
    )
    assert child.returncode == -signal.SIGKILL
    parent, stage = child.stdout.split()
    return parent, stage


def test_runs_of_a_killed_process_are_ended_and_lose_no_step_it_measured(
    uri: str, tmp_path: Path
) -> None:
    parent, stage = killed_run(uri, tmp_path / "journal")
    assert read(uri, stage).info.status == "RUNNING"
    assert len(history(uri, stage, "lr")) < 300  # the queue was cut
    tracker = start(uri, tmp_path / "journal")
    assert sorted(tracker.killed_runs) == sorted([parent, stage])
    assert {read(uri, run).info.status for run in (parent, stage)} == {"KILLED"}
    for key in ("lr", "reward/mean"):
        assert [step for step, _ in history(uri, stage, key)] == list(range(1, 301))
    assert kill_running(uri) == []  # this process lives
    resumed = tracker.stage("rl", "rl", {}, resumed_step=250)
    resumed.log_step(250, {"lr": 99.0, "eval/greedy_accuracy": 0.5})
    resumed.log_step(251, {"lr": 25.1})
    tracker.finish("FINISHED")
    steps = [(step, step / 10) for step in range(1, 252)]
    assert history(uri, resumed.run_id, "lr") == steps
    assert history(uri, resumed.run_id, "eval/greedy_accuracy") == [(250, 0.5)]


def test_what_mlflow_holds_already_is_not_recovered_again(uri: str) -> None:
    tracker = start(uri)
    client, run_id = MlflowClient(tracking_uri=uri), tracker.run_id
    mlflow_store.log_rows(client, run_id, [JournalRow(1, 5, {"lr": 0.1, "grad/norm": 1.0})])
    rows = [JournalRow(1, 5, {"lr": 9.0, "grad/norm": 9.0}), JournalRow(2, 6, {"lr": 0.2})]
    mlflow_store.recover_rows(client, run_id, [*rows, JournalRow(2, 7, {"eval/gain": 0.5})])
    assert history(uri, run_id, "lr") == [(1, 0.1), (2, 0.2)]
    assert history(uri, run_id, "grad/norm") == [(1, 1.0)]
    assert history(uri, run_id, "eval/gain") == [(2, 0.5)]
    tracker.finish("FINISHED")


def test_a_number_given_to_another_process_since_does_not_keep_a_run_alive(uri: str) -> None:
    tracker = start(uri)
    client = MlflowClient(tracking_uri=uri)
    assert kill_running(uri) == []
    me = Owner.this()
    other = str(replace(me, start=f"{me.start}1"))
    client.set_tag(tracker.run_id, mlflow_store.TAG_OWNER, other)
    assert kill_running(uri) == [tracker.run_id]
    client.set_terminated(tracker.run_id, "RUNNING")
    client.set_tag(tracker.run_id, mlflow_store.TAG_OWNER, f"another-machine@{me.pid}@1")
    assert kill_running(uri) == []


def test_the_database_is_made_once_and_what_is_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="choose another --home"):
        prepare_database(tmp_path / "file")
    (tmp_path / "mlflow").mkdir()
    (tmp_path / "mlflow" / "mlflow.db").write_text("no database at all")
    with pytest.raises(ResourceError, match="is not a SQLite database"):
        prepare_database(tmp_path)


def test_preparing_again_keeps_what_is_there(uri: str, tmp_path: Path) -> None:
    tracker = start(uri)
    tracker.finish("FINISHED")
    assert prepare_database(tmp_path) == uri
    assert read(uri, tracker.run_id).info.status == "FINISHED"
    assert not list((tmp_path / "mlflow").glob(".partial*"))


def test_what_several_processes_set_at_once_is_refused_to_none(uri: str) -> None:
    """MLflow looks before it inserts: the database refuses the second of two that saw nothing."""
    client = mlflow_store.connect(uri)
    client.create_registered_model("policy")
    client.create_model_version("policy", "file:///weights")
    with ThreadPoolExecutor(4) as pool:
        for index in range(10):
            together = threading.Barrier(4, timeout=60)

            def alias(together: threading.Barrier = together, name: str = f"best{index}") -> None:
                together.wait()
                registry.move_alias(uri, "policy", name, "1")

            def tag(together: threading.Barrier = together, name: str = f"tag{index}") -> None:
                together.wait()
                registry.tag_version(uri, "policy", "1", {name: "yes"})

            for job in [pool.submit(act) for act in (alias, alias, tag, tag)]:
                job.result()
    kept = client.get_model_version("policy", "1")
    assert len(kept.aliases) == len(kept.tags) == 10


def test_nothing_is_written_to_the_terminal_or_the_working_directory(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from posttrain.core.tracking.mlflow_tracker import *\n"
        "uri = prepare_database(Path('home'))\n"
        "tracker = PipelineTracker.start(uri=uri, experiment='e', run_name='r', config_yaml='',"
        " params={}, tags={})\n"
        "stage = tracker.stage('rl', 'rl', {})\n"
        "model = stage.log_model_output(name='p', uri='/p', digest='d', step=1)\n"
        "from posttrain.core.tracking.registry import register_champion\n"
        "register_champion(uri, model, 'p', {})\n"
        "tracker.finish('FINISHED')\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW_")}
    child = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (child.stdout, child.stderr) == ("", "")
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
