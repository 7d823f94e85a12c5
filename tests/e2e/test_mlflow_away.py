"""Runs whose MLflow server, a real process, is killed in the middle of training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient

from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.runtime.processes import free_ports
from posttrain.core.tracking.mlflow_store import prepare_database
from tests.helpers.pipeline import (
    environment,
    journal_lines,
    run_command,
    start_command,
    tiny_config,
    wait_for_step,
    write_config,
)

STEPS = 10


class MlflowServer:
    """`mlflow server` on one port, which can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.database = prepare_database(folder)
        (self.port,) = free_ports(1)
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--workers", "1"]
        command += ["--backend-store-uri", self.database]
        command += ["--artifacts-destination", str(self.folder / "files")]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env=environment() | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
                start_new_session=True,
            )
        end = time.monotonic() + 120
        while not self._answers():
            assert time.monotonic() < end and self._process.poll() is None
            time.sleep(0.2)

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process = None

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


@pytest.fixture
def server(tmp_path: Path) -> Iterator[MlflowServer]:
    made = MlflowServer(tmp_path / "server")
    made.start()
    yield made
    made.kill()


def config(tmp_path: Path, *, registers: bool) -> Path:
    made = tiny_config(make_tiny_model(tmp_path / "model"))
    stages = made["stages"]
    wanted = ["sft", "rl", "evaluate", *(["register"] if registers else [])]
    stages = {name: stages[name] for name in wanted}
    stages["rl"] |= {"steps": STEPS, "rewards": ["accuracy"], "checkpoint_every": 0}
    del stages["rl"]["inputs"]["reward_model"], stages["evaluate"]["inputs"]["baseline"]
    return write_config(tmp_path / "run.yaml", made | {"stages": stages})


def kill_at_step(server: MlflowServer, home: Path, process: subprocess.Popen[str]) -> None:
    wait_for_step(home, 2, process)
    server.kill()


def waiting(home: Path) -> list[Path]:
    return sorted((home / "runs").glob("*/mlflow-waiting*"))


def files(client: MlflowClient, run_id: str, folder: str = "") -> set[str]:
    found = set[str]()
    for item in client.list_artifacts(run_id, folder or None):
        found |= files(client, run_id, item.path) if item.is_dir else {item.path}
    return found


def check_record(
    server: MlflowServer, home: Path, result: dict[str, Any], names: set[str]
) -> dict[str, str]:
    """Everything is there, exactly once, as of a run that nothing happened to; the stages' ids."""
    client, parent = MlflowClient(server.uri), result["mlflow_run_id"]
    experiment = client.get_run(parent).info.experiment_id
    children = [r for r in client.search_runs([experiment]) if r.info.run_id != parent]
    stages = {run.data.tags["posttrain.stage"]: run for run in children}
    assert Counter(r.data.tags["posttrain.stage"] for r in children) == dict.fromkeys(names, 1)
    for name, run in stages.items():
        assert run.info.status == "FINISHED", name
        assert run.data.tags["mlflow.parentRunId"] == parent
        assert run.data.params["kind"] == name
        assert run.info.start_time <= run.info.end_time
    assert client.get_run(parent).info.status == "FINISHED"

    rl = stages["rl"].info.run_id
    for metric in ("reward/mean", "grad/norm"):
        points = client.get_metric_history(rl, metric)
        assert sorted(point.step for point in points) == [*range(1, STEPS + 1)], metric
    journal = [json.loads(line) for line in journal_lines(home, "rl")]
    rewards = {row["step"]: row["metrics"].get("reward/mean") for row in journal}
    for point in client.get_metric_history(rl, "reward/mean"):
        assert rewards[point.step] == pytest.approx(point.value)

    tables = {path for path in files(client, rl) if path.startswith("tables/samples/")}
    assert tables == {f"tables/samples/step-{step:06d}.json" for step in range(1, STEPS + 1)}
    tagged = json.loads(stages["rl"].data.tags["mlflow.loggedArtifacts"])
    paths = [entry["path"] for entry in tagged]
    assert len(paths) == len(set(paths)) and set(paths) >= tables
    assert any(path.startswith("plots/") for path in files(client, rl))
    assert "tables/held_out/step-000000.json" in files(client, stages["evaluate"].info.run_id)
    assert {"log.txt", "config.yaml", "run_card.html", "summary/lineage.html"} <= files(
        client, parent
    )

    models = client.search_logged_models([experiment])
    assert sorted(model.name for model in models) == ["rl", "sft"]
    (trained,) = [model for model in models if model.name == "rl"]
    assert trained.source_run_id == rl
    assert [o.model_id for o in stages["rl"].outputs.model_outputs] == [trained.model_id]
    outputs = client.get_run(parent).outputs.model_outputs
    assert sorted(o.model_id for o in outputs) == sorted(model.model_id for model in models)
    read = client.get_run(stages["evaluate"].info.run_id).inputs.model_inputs
    assert trained.model_id in [item.model_id for item in read]
    assert any(m.key == "eval/greedy_accuracy" for m in trained.metrics or [])
    for manifest in (home / "artifacts").glob("*/manifest.json"):
        assert "pending-" not in manifest.read_text()
    assert waiting(home) == []
    return {name: run.info.run_id for name, run in stages.items()}


@pytest.mark.timeout(600)
def test_an_mlflow_that_comes_back_has_everything_exactly_once(
    server: MlflowServer, tmp_path: Path
) -> None:
    """It is gone from step 2 on, for the next stage too, until a stage needs its registry."""
    home, variables = tmp_path / "home", {"MLFLOW_TRACKING_URI": server.uri}
    path = config(tmp_path, registers=True)
    process = start_command("run", str(path), "--home", str(home), "--json", variables=variables)
    kill_at_step(server, home, process)
    log = home / "runs"
    end = time.monotonic() + 240
    while not any("register: waits for MLflow" in p.read_text() for p in log.glob("*/log.txt")):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.2)
    assert len(journal_lines(home, "rl")) >= STEPS, "training did not wait"
    server.start()
    text = process.communicate(timeout=240)[0]
    assert process.returncode == 0, text
    result = json.loads(text.strip().splitlines()[-1])
    assert all(len(stage["mlflow_run_id"]) == 32 for stage in result["stages"].values())
    reported = [line for line in result["warnings"] if "MLflow" in line]
    assert len(reported) == 3, reported  # away, waits, back
    check_record(server, home, result, {"sft", "rl", "evaluate", "register"})
    client = MlflowClient(server.uri, registry_uri=server.uri)
    version = client.get_model_version_by_alias("tiny", "candidate")
    assert version.run_id == result["stages"]["rl"]["mlflow_run_id"]


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_a_run_ends_well_without_mlflow_and_the_next_command_sends_its_record(
    server: MlflowServer, tmp_path: Path
) -> None:
    home, variables = tmp_path / "home", {"MLFLOW_TRACKING_URI": server.uri}
    path = config(tmp_path, registers=False)
    process = start_command("run", str(path), "--home", str(home), "--json", variables=variables)
    kill_at_step(server, home, process)
    text = process.communicate(timeout=300)[0]
    assert process.returncode == 0, text
    assert "Traceback" not in text
    result = json.loads(text.strip().splitlines()[-1])
    assert set(result["stages"]) == {"sft", "rl", "evaluate"}
    last = result["warnings"][-1]
    assert "the results are complete on disk" in last
    assert f"`posttrain send --home {home}`" in last
    assert (home / "runs" / result["run_id"] / "run_card.html").is_file()
    assert [folder.name for folder in waiting(home)] == ["mlflow-waiting"]

    still = run_command("send", "--home", str(home), "--json", variables=variables)
    assert still.code == 1 and still.result["waiting"], still.text
    refused = run_command("run", str(path), "--home", str(home), variables=variables)
    assert refused.code == 4 and "cannot be reached" in refused.text, refused.text
    assert "Traceback" not in refused.text

    server.start()
    sent = run_command("send", "--home", str(home), "--json", variables=variables)
    assert sent.code == 0 and not sent.result["waiting"], sent.text
    assert "were sent to MLflow" in sent.result["messages"][0]
    recorded = check_record(server, home, result, {"sft", "rl", "evaluate"})
    again = run_command("run", str(path), "--home", str(home), "--json", variables=variables)
    assert {s["status"] for s in again.result["stages"].values()} == {"cached"}, again.text
    client = MlflowClient(server.uri)
    experiment = client.get_run(result["mlflow_run_id"]).info.experiment_id
    reused = [run.data.tags for run in client.search_runs([experiment])]
    linked = {
        tags["posttrain.stage"]: tags["posttrain.cached_from"]
        for tags in reused
        if "posttrain.cached_from" in tags
    }
    assert linked == recorded
    assert len(client.search_logged_models([experiment])) == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("back", ["before_the_kill", "after_the_kill"])
def test_a_run_killed_after_an_outage_leaves_no_placeholder(
    server: MlflowServer, tmp_path: Path, back: str
) -> None:
    """A stage is stored while MLflow is away; the run is killed in the next one."""
    home, variables = tmp_path / "home", {"MLFLOW_TRACKING_URI": server.uri}
    path = config(tmp_path, registers=False)
    made = yaml.safe_load(path.read_text())
    stages = made["stages"]
    stages["longer"] = stages["rl"] | {"steps": 10_000, "inputs": {"model": "rl"}}
    del stages["evaluate"]
    write_config(path, made)
    process = start_command("run", str(path), "--home", str(home), variables=variables)
    kill_at_step(server, home, process)
    _until(lambda: bool(journal_lines(home, "longer")), process)
    (stored,) = (home / "artifacts").glob("rl-*/manifest.json")
    assert "pending-" in stored.read_text()
    if back == "before_the_kill":
        server.start()
        _until(lambda: not waiting_operations(home), process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if back == "after_the_kill":
        server.start()
    sent = run_command("send", "--home", str(home), "--json", variables=variables)
    assert sent.code == 0 and not sent.result["waiting"], sent.text
    row = json.loads(stored.read_text())
    client = MlflowClient(server.uri)
    assert client.get_run(row["mlflow_run_id"]).data.tags["posttrain.stage"] == "rl"
    for item in row["artifacts"]:
        if item["mlflow_model_id"]:
            assert client.get_logged_model(item["mlflow_model_id"]).name == "rl"
    for record in home.rglob("*.json"):
        assert "pending-" not in record.read_text(), record
    assert waiting(home) == []


def waiting_operations(home: Path) -> list[Path]:
    return sorted((home / "runs").glob("*/mlflow-waiting/operations.jsonl"))


def _until(holds: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 240
    while not holds():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.1)
