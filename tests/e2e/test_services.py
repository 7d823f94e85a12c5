"""The services a user brings up, pipelines that report to them, and deployments that train.

Over 300 lines because all of it is of one set of services, which takes a minute to bring up.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from mlflow import MlflowClient
from mlflow.artifacts import download_artifacts

from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.runtime.processes import free_ports
from tests.helpers.pipeline import (
    Finished,
    environment,
    run_command,
    tiny_config,
    wait_for_step,
    write_config,
)
from tests.helpers.services import HASTE, Services, processes_of

REPOSITORY = Path(__file__).parents[2]
FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
STAGES = ["sft", "rl", "evaluate", "register"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Training, measuring and registering, in a few seconds."""
    folder = tmp_path_factory.mktemp("config")
    made = tiny_config(make_tiny_model(folder / "model"))
    stages = made["stages"]
    stages = {name: stages[name] for name in STAGES}
    stages["rl"] |= {"steps": 2, "evaluate_every": 0, "rewards": ["accuracy"]}
    del stages["rl"]["inputs"]["reward_model"], stages["evaluate"]["inputs"]["baseline"]
    return write_config(folder / "run.yaml", made | {"stages": stages})


@pytest.fixture(scope="module", autouse=True)
def nightly(services: Services, config: Path) -> Iterator[str]:
    """A deployment that is due every minute, made first: its time comes while others are tested."""
    done = services.run(
        *("deploy", str(config), "--name", "nightly", "--cron", "* * * * *"),
        *("--set", "name=scheduled", "--set", "seed=7", "--json"),
    )
    assert done.code == 0, done.text
    assert done.result["deployment"] == "train/nightly"
    yield done.result["page"].rpartition("/")[2]


@dataclass(frozen=True)
class Run:
    """A home, and the JSON object that a run in it ended with."""

    home: Path
    result: dict[str, Any]


@pytest.fixture(scope="module")
def runs(services: Services, config: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """The same pipeline run in two homes at the same time."""
    homes = [tmp_path_factory.mktemp("homes") / name for name in ("a", "b")]
    started = [services.start("run", str(config), "--home", str(home), "--json") for home in homes]
    said = [process.communicate(timeout=200)[0] for process in started]
    for process, text in zip(started, said, strict=True):
        assert process.returncode == 0, text
    results = [json.loads(text.strip().splitlines()[-1]) for text in said]
    return [Run(home, result) for home, result in zip(homes, results, strict=True)]


def read_artifact(services: Services, run_id: str, name: str) -> str:
    """The text of a run's artifact, by the server of `services` whatever this process used last."""
    with tempfile.TemporaryDirectory() as folder:
        path = download_artifacts(
            artifact_uri=f"runs:/{run_id}/{name}",
            dst_path=folder,
            tracking_uri=services.mlflow_uri,
        )
        return Path(path).read_text()


@pytest.mark.slow
def test_a_second_up_changes_nothing(services: Services) -> None:
    before = services.run("services", "status", "--home", str(services.home), "--json")
    again = services.run("services", "up", "--home", str(services.home), "--json")
    assert again.code == 0, again.text
    assert {name: again.result[name] for name in services.variables} == services.variables
    after = services.run("services", "status", "--home", str(services.home), "--json")
    assert before.code == after.code == 0
    assert after.result == before.result
    assert all(row["ready"] for row in after.result["services"].values())


def test_the_password_is_in_one_private_file_and_nowhere_else(services: Services) -> None:
    folder = services.home / "services"
    kept = folder / "pgpass"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    password = kept.read_text().strip().rpartition(":")[2]
    assert len(password) >= 24
    for log in (folder / "logs").iterdir():
        assert password not in log.read_text(), log
    for place in (
        f"/proc/{pid}/{part}" for pid in psutil.pids() for part in ("cmdline", "environ")
    ):
        try:
            assert password.encode() not in Path(place).read_bytes(), place
        except OSError:
            continue  # ended meanwhile, or another user's


def test_the_database_refuses_who_has_no_password(services: Services) -> None:
    import psycopg2

    ports = services.home / "services" / "ports.json"
    port = int(ports.read_text().partition('"postgres": ')[2].partition(",")[0])
    where = {"host": "127.0.0.1", "port": port, "user": "posttrain", "dbname": "mlflow"}
    with pytest.raises(psycopg2.OperationalError, match="password"):
        psycopg2.connect(**where, passfile="/nonexistent")
    psycopg2.connect(**where, passfile=str(services.home / "services" / "pgpass")).close()


@pytest.mark.slow
def test_a_run_is_on_both_servers_and_nothing_of_it_in_local_databases(
    services: Services, runs: list[Run]
) -> None:
    result = runs[0].result
    assert result["mlflow_uri"] == services.mlflow_uri
    assert result["links"]["mlflow"].startswith(services.mlflow_uri)
    pages = services.prefect_url.removesuffix("/api")
    assert result["links"]["prefect"].startswith(f"{pages}/runs/flow-run/")
    flow_run = services.ask("GET", f"/flow_runs/{result['prefect_flow_run_id']}")
    assert flow_run["state_type"] == "COMPLETED"
    tasks = services.ask(
        "POST", "/task_runs/filter", {"flow_runs": {"id": {"any_": [flow_run["id"]]}}}
    )
    assert set(STAGES) <= {task["name"] for task in tasks}
    for each in runs:
        assert not (each.home / "mlflow").exists()
        assert not (each.home / "prefect" / "prefect.db").exists()
    client = MlflowClient(services.mlflow_uri)
    run = client.get_run(result["mlflow_run_id"])
    assert run.info.status == "FINISHED"
    assert run.info.artifact_uri.startswith("mlflow-artifacts:"), "files go through the server"
    assert "summary" in {item.path for item in client.list_artifacts(run.info.run_id)}
    # Read back through the server, which keeps them below its own folder.
    assert "stages:" in read_artifact(services, run.info.run_id, "config.yaml")
    assert list((services.home / "services" / "mlflow").rglob("config.yaml"))


@pytest.mark.slow
def test_two_homes_on_one_server_do_not_interfere(services: Services, runs: list[Run]) -> None:
    """They trained at the same time, each all of it, to the same weights, in runs of their own."""
    digests = []
    for run in runs:
        stages = run.result["stages"]
        assert {stage["status"] for stage in stages.values()} == {"ran"}
        for stage in stages.values():
            assert all(item["uri"].startswith(str(run.home)) for item in stage["artifacts"])
        digests.append([stages[name]["artifacts"][0]["digest"] for name in ("sft", "rl")])
    assert digests[0] == digests[1]
    client = MlflowClient(services.mlflow_uri)
    made = {stage["mlflow_run_id"] for run in runs for stage in run.result["stages"].values()}
    assert len(made) == 2 * len(STAGES), "every stage of both homes has a run of its own"
    assert {client.get_run(identity).info.status for identity in made} == {"FINISHED"}


def test_a_schedule_fires_and_its_run_trains(services: Services, nightly: str) -> None:
    """Nobody asks for the run: the server's schedule does, and the worker runs it."""
    chosen = {"deployments": {"id": {"any_": [nightly]}}, "sort": "EXPECTED_START_TIME_ASC"}
    deadline = time.monotonic() + 120  # the scheduler looks for new deployments now and then
    while not (found := services.ask("POST", "/flow_runs/filter", {**chosen, "limit": 1})):
        assert time.monotonic() < deadline, "nothing was scheduled"
        time.sleep(0.5)
    first = found[0]
    assert first["auto_scheduled"]
    run = services.flow_run(first["id"], FINAL, seconds=150)
    unschedule(services, nightly)
    assert run["state_type"] == "COMPLETED", (run["state"], services.log("worker")[-5000:])
    client = MlflowClient(services.mlflow_uri)
    experiment = client.get_experiment_by_name("scheduled")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    trained = [r for r in runs if r.data.tags.get("posttrain.stage") == "rl"]
    assert trained and trained[-1].info.status == "FINISHED"
    assert trained[-1].info.artifact_uri.startswith("mlflow-artifacts:"), "through the server"
    assert client.get_metric_history(trained[-1].info.run_id, "reward/mean")
    models = list((services.home / "artifacts").glob("rl-*/model/model.safetensors"))
    assert models, "in the worker's home"
    artifacts = services.ask(
        "POST", "/artifacts/filter", {"flow_runs": {"id": {"any_": [first["id"]]}}}
    )
    assert {item["key"] for item in artifacts} == {"mlflow-run", "run-card"}


def wait_for_stage(services: Services, name: str, state: str) -> None:
    """Until a stage's MLflow run of the experiment `name` is in `state`."""
    client = MlflowClient(services.mlflow_uri)
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        experiment = client.get_experiment_by_name(name)
        runs = client.search_runs([experiment.experiment_id]) if experiment else []
        stages = [run for run in runs if "posttrain.stage" in run.data.tags]
        if stages and all(run.info.status == state for run in runs):
            return
        time.sleep(0.3)
    raise AssertionError(services.log("worker")[-3000:])


def unschedule(services: Services, deployment: str) -> None:
    """Take its schedule away: one run at a time would leave out those that tests ask for.

    What it had started already ends first.
    """
    for schedule in services.ask("GET", f"/deployments/{deployment}")["schedules"]:
        services.ask("DELETE", f"/deployments/{deployment}/schedules/{schedule['id']}")
    under_way = {
        "deployments": {"id": {"any_": [deployment]}},
        "flow_runs": {"state": {"type": {"any_": ["PENDING", "RUNNING"]}}},
    }
    deadline = time.monotonic() + 120
    while services.ask("POST", "/flow_runs/filter", under_way):
        assert time.monotonic() < deadline, services.log("worker")[-3000:]
        time.sleep(0.5)


def start_long_run(services: Services, nightly: str, name: str) -> str:
    """A run of the deployment that would go on for hours, once it trains; its id."""
    unschedule(services, nightly)
    request = services.ask("GET", f"/deployments/{nightly}")["parameters"]["request"]
    request["overrides"] = [f"name={name}", "stages.sft.steps=100000"]
    asked = services.ask(
        "POST", f"/deployments/{nightly}/create_flow_run", {"parameters": {"request": request}}
    )
    wait_for_stage(services, name, "RUNNING")
    return str(asked["id"])


@pytest.mark.slow
def test_a_cancelled_run_stops_cleanly(services: Services, nightly: str) -> None:
    identity = start_long_run(services, nightly, "cancelled")
    cancelling = {"state": {"type": "CANCELLING"}}
    services.ask("POST", f"/flow_runs/{identity}/set_state", cancelling)
    run = services.flow_run(identity, FINAL)
    assert run["state_type"] == "CANCELLED", run["state"]
    wait_for_stage(services, "cancelled", "KILLED")
    assert not list((services.home / "artifacts").glob(".partial-*"))


@pytest.mark.slow
def test_a_served_config_runs_and_ends_with_its_server(
    services: Services, config: Path, runs: list[Run]
) -> None:
    """The interrupt reaches the server alone, as one of a service manager does."""
    home = str(runs[0].home)
    served = services.start("serve", str(config), "--name", "served", "--home", home)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                deployment = services.ask("GET", "/deployments/name/train/served")
                break
            except httpx.HTTPStatusError:
                assert time.monotonic() < deadline and served.poll() is None
                time.sleep(0.3)
        start_long_run(services, deployment["id"], "served")
        family = psutil.Process(served.pid).children(recursive=True)
        assert any("spawn_main" in " ".join(process.cmdline()) for process in family), family
    finally:
        served.send_signal(signal.SIGINT)
        said, _ = served.communicate(timeout=60)
    assert served.returncode == 0, said
    assert not psutil.wait_procs(family, timeout=10)[1]
    assert "Traceback" not in said, said
    wait_for_stage(services, "served", "KILLED")


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_a_served_schedule_goes_on_after_its_run_was_killed_with_its_server(
    services: Services, config: Path, tmp_path: Path
) -> None:
    """`serve` and its run are killed at once, so that nobody reports the end of the run."""
    name = ("--name", "killed", "--home", str(tmp_path / "home"), "--set", "name=killed")
    served = services.start(
        "serve", str(config), *name, "--set", "stages.sft.steps=100000", "--cron", "* * * * *"
    )
    deadline = time.monotonic() + 60
    while True:
        try:
            deployment = services.ask("GET", "/deployments/name/train/killed")
            break
        except httpx.HTTPStatusError:
            assert time.monotonic() < deadline and served.poll() is None
            time.sleep(0.3)
    wait_for_stage(services, "killed", "RUNNING")
    family = [psutil.Process(served.pid), *psutil.Process(served.pid).children(recursive=True)]
    for process in family:
        process.kill()
    served.communicate()
    of_it = {"deployments": {"id": {"any_": [deployment["id"]]}}}
    running = {"flow_runs": {"state": {"type": {"any_": ["RUNNING"]}}}}
    (left,) = services.ask("POST", "/flow_runs/filter", {**of_it, **running})
    again = services.start("serve", str(config), *name, "--cron", "* * * * *")
    try:
        ended = services.flow_run(left["id"], FINAL, seconds=60)
        assert ended["state_type"] == "CRASHED", ended["state"]
        done = {"flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}}
        deadline = time.monotonic() + 300
        while not services.ask("POST", "/flow_runs/filter", {**of_it, **done}):
            assert time.monotonic() < deadline, "no later run of the schedule"
            time.sleep(1)
    finally:
        for process in [*psutil.Process(again.pid).children(recursive=True), again]:
            process.kill()
        again.communicate()


def test_a_request_that_is_no_request_is_refused_before_it_runs(
    services: Services, nightly: str
) -> None:
    wrong: list[dict[str, Any]] = [
        {"configs": []},
        {"configs": ["x"], "seed": "seven"},
        {"configs": ["x"], "overrides": ["steps"]},
        {"configs": ["x"], "sed": 1},
    ]
    for request in wrong:
        with pytest.raises(httpx.HTTPStatusError, match="409|422"):
            services.ask(
                "POST",
                f"/deployments/{nightly}/create_flow_run",
                {"parameters": {"request": request}},
            )


@pytest.mark.slow
def test_the_deployments_of_the_repository_can_be_made(services: Services, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    settings = {"PREFECT_HOME": str(tmp_path)}
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=environment() | services.variables | settings,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("train/train", "evaluate/evaluate", "continual/continual"):
        made = services.ask("GET", f"/deployments/name/{name}")
        assert made["work_pool_name"] == "posttrain"
        fields = made["parameter_openapi_schema"]["definitions"]
        request = fields.get("RunRequest") or fields["EvaluateRequest"]
        assert {"configs", "overrides", "seed", "home"} <= set(request["properties"])
        assert all(field.get("description") for field in request["properties"].values())


@pytest.mark.slow
def test_a_kubernetes_pool_takes_a_deployment(services: Services, config: Path) -> None:
    template = json.loads((REPOSITORY / "infra/kubernetes/base-job-template.json").read_text())
    pool = {"name": "cluster", "type": "kubernetes", "base_job_template": template}
    services.ask("POST", "/work_pools/", pool)
    done = services.run(
        *("deploy", str(config), "--pool", "cluster", "--flow", "continual", "--name", "remote"),
        *("--cron", "0 2 * * *", "--timezone", "Europe/Berlin", "--json"),
        *("--job-variable", "image=registry/posttrain:1", "--job-variable", "gpus='2'"),
    )
    assert done.code == 0, done.text
    made = services.ask("GET", "/deployments/name/continual/remote")
    assert made["job_variables"] == {"image": "registry/posttrain:1", "gpus": "2"}
    assert made["schedules"][0]["schedule"] == {
        "cron": "0 2 * * *",
        "timezone": "Europe/Berlin",
        "day_or": True,
    }
    assert made["entrypoint"] == "posttrain.pipelines.deploy.flows.continual"
    assert made["global_concurrency_limit"]["limit"] == 1


@pytest.mark.slow
def test_servers_on_sqlite_are_refused_in_one_sentence(
    services: Services, config: Path, tmp_path: Path
) -> None:
    nowhere = services_run(services, {"PREFECT_API_URL": ""}, "deploy", config)
    assert nowhere.code == 4 and "PREFECT_API_URL is empty" in nowhere.text
    local = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}
    refused = services_run(services, local, "serve", config)
    assert refused.code == 4 and "SQLite" in refused.text and "services up" in refused.text
    port = free_ports(1)[0]
    server = subprocess.Popen(
        [sys.executable, "-m", "prefect", "server", "start", "--port", str(port)],
        env=environment() | {"PREFECT_HOME": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        url = f"http://127.0.0.1:{port}/api"
        deadline = time.monotonic() + 90
        while not _answers(f"{url}/health"):
            assert time.monotonic() < deadline and server.poll() is None
            time.sleep(0.2)
        refused = services_run(services, {"PREFECT_API_URL": url}, "deploy", config)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)
    assert refused.code == 4 and "keeps its data in SQLite" in refused.text, refused.text


def _answers(url: str) -> bool:
    try:
        with httpx.Client(trust_env=False) as client:
            return client.get(url).status_code == 200
    except httpx.TransportError:
        return False


def services_run(services: Services, other: dict[str, str], command: str, config: Path) -> Finished:
    """The command in addition to the services, with other variables than theirs."""
    done = run_command(command, str(config), variables=services.variables | other)
    assert "Traceback" not in done.text, done.text
    assert len([line for line in done.text.splitlines() if line.strip()]) == 1, done.text
    return done


@pytest.mark.timeout(900)
@pytest.mark.parametrize("away_s", [10, 60], ids=["10s", "a_minute"])
@pytest.mark.slow
def test_servers_that_are_gone_for_a_while_lose_nothing(
    services: Services,
    config: Path,
    tmp_path: Path,
    away_s: int,
) -> None:
    """Prefect's and MLflow's die at once, in the middle of training, and are started again."""
    home, steps = tmp_path / "home", 12
    more = ("--set", f"stages.rl.steps={steps}", "--set", f"seed={away_s}", "--json")
    process = services.start("run", str(config), "--home", str(home), *more)
    wait_for_step(home, 1, process)
    for name in ("prefect", "mlflow"):
        record = json.loads((services.home / "services" / "running" / f"{name}.json").read_text())
        os.killpg(record["pid"], signal.SIGKILL)
    time.sleep(away_s)
    up = run_command("services", "up", "--home", str(services.home), "--json", variables=HASTE)
    assert up.code == 0, up.text
    text = process.communicate(timeout=400)[0]
    assert process.returncode == 0, text
    result = json.loads(text.strip().splitlines()[-1])
    client = MlflowClient(services.mlflow_uri)
    for metric in ("reward/mean", "grad/norm"):
        points = client.get_metric_history(result["stages"]["rl"]["mlflow_run_id"], metric)
        assert sorted(point.step for point in points) == [*range(1, steps + 1)]
    run_id = result["mlflow_run_id"]
    assert client.get_run(run_id).info.status == "FINISHED"
    assert "[register] ran in " in read_artifact(services, run_id, "log.txt")
    services.flow_run(result["prefect_flow_run_id"], ["COMPLETED"])


@pytest.mark.slow
def test_down_stops_a_run_cleanly_and_data_are_there_after_the_next_up(
    services: Services, nightly: str, runs: list[Run]
) -> None:
    """The last test of this file: it starts the services again, on the same ports."""
    identity = start_long_run(services, nightly, "stopped")
    home = ("--home", str(services.home))
    down = services.run("services", "down", *home)
    assert down.code == 0, down.text
    assert processes_of(services.home) == []
    up = run_command("services", "up", *home, "--json", variables=HASTE)
    assert up.code == 0, up.text
    assert {name: up.result[name] for name in services.variables} == services.variables
    wait_for_stage(services, "stopped", "KILLED")
    assert services.flow_run(identity, FINAL)["state_type"] == "CRASHED"
    before = MlflowClient(services.mlflow_uri).get_run(runs[0].result["mlflow_run_id"])
    assert before.info.status == "FINISHED", "what was recorded before is still there"
