"""The services without starting them all: what stops `up`, what containers and jobs are given."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from pydantic import ValidationError

from posttrain.core.config.loading import load_config
from posttrain.core.config.resolve import resolve
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.runtime.processes import free_ports
from posttrain.pipelines.deploy.forms import EvaluateRequest, RunRequest
from posttrain.pipelines.services import postgres
from posttrain.pipelines.services.processes import find
from tests.helpers.pipeline import Finished, run_command
from tests.helpers.services import (
    processes_of,
    skip_unless_possible,
    temporary_home,
)

INFRA = Path(__file__).parents[2] / "infra"
COMPOSE = yaml.safe_load((INFRA / "compose.yaml").read_text())


@pytest.fixture
def home() -> Iterator[Path]:
    skip_unless_possible()
    with temporary_home() as folder:
        yield folder


def up(home: Path, **chosen: int) -> Finished:
    numbers = dict(zip(("postgres", "prefect", "mlflow"), free_ports(3), strict=True)) | chosen
    ports = [text for name, port in numbers.items() for text in (f"--{name}-port", str(port))]
    done = run_command("services", "up", "--home", str(home), *ports)
    assert "Traceback" not in done.text, done.text
    return done


def test_a_port_in_use_is_told_before_anything_starts(home: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = up(home, mlflow=port)
    assert done.code == 4
    assert f"port {port}" in done.text and "--mlflow-port" in done.text
    assert not (home / "services" / "postgres").exists()
    assert processes_of(home) == []


def test_two_servers_on_one_port_are_refused(home: Path) -> None:
    (port,) = free_ports(1)
    done = up(home, mlflow=port, prefect=port)
    assert done.code == 4 and "three ports" in done.text


def test_a_service_that_dies_is_told_with_its_log_and_nothing_is_left_running(home: Path) -> None:
    """A cluster that is none: PostgreSQL ends at once."""
    services = home / "services"
    (services / "postgres" / "data").mkdir(parents=True)
    (services / "pgpass").write_text("127.0.0.1:*:*:posttrain:x\n")
    done = up(home)
    assert done.code == 4, done.text
    assert "postgres ended while it started" in done.text
    assert str(services / "logs" / "postgres.log") in done.text
    assert processes_of(home) == []
    assert not list((services / "running").glob("*.json"))


def test_databases_without_their_password_are_not_replaced(home: Path) -> None:
    kept = home / "services" / "postgres" / "data" / "PG_VERSION"
    kept.parent.mkdir(parents=True)
    kept.write_text("15\n")
    done = up(home)
    assert done.code == 4 and "pgpass" in done.text and "restore it" in done.text
    assert kept.read_text() == "15\n"


def test_what_to_install_is_said_where_postgresql_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "DEBIAN", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = postgres.why_missing()
    assert missing is not None and "apt-get install postgresql" in missing


def test_status_of_services_that_were_never_started(tmp_path: Path) -> None:
    done = run_command("services", "status", "--home", str(tmp_path), "--json")
    assert done.code == 4
    assert done.result == {"up": False, "services": {}, "home": str(tmp_path)}
    stopped = run_command("services", "down", "--home", str(tmp_path))
    assert stopped.code == 0, stopped.text
    assert list(tmp_path.iterdir()) == [], "neither makes anything"


def test_a_process_that_got_the_number_of_a_dead_one_is_not_taken_for_it(tmp_path: Path) -> None:
    own = psutil.Process()
    record = tmp_path / "record.json"
    record.write_text(json.dumps({"pid": own.pid, "started": own.create_time()}))
    assert find(record) == own
    record.write_text(json.dumps({"pid": own.pid, "started": own.create_time() - 60}))
    assert find(record) is None


def test_the_compose_file_has_the_four_services_on_this_machine_only() -> None:
    services = COMPOSE["services"]
    assert set(services) == {"postgres", "prefect", "mlflow", "worker"}
    for name, service in services.items():
        for published in service.get("ports", []):
            assert published.startswith("127.0.0.1:"), name
    assert "ports" not in services["postgres"], "the database is reached by the servers alone"
    for name in ("prefect", "mlflow"):
        assert services[name]["depends_on"]["postgres"] == {"condition": "service_healthy"}
        assert services[name]["healthcheck"]["test"]
    assert {"--serve-artifacts", "--artifacts-destination"} <= set(services["mlflow"]["command"])
    worker = services["worker"]
    assert {"PREFECT_API_URL", "MLFLOW_TRACKING_URI", "POSTTRAIN_HOME"} <= set(
        worker["environment"]
    )
    assert "secrets" not in worker, "a worker has no business in the database"
    for service in services.values():
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert source in COMPOSE["volumes"] or (INFRA / source).exists(), volume


def test_the_compose_file_holds_no_password() -> None:
    assert COMPOSE["secrets"] == {"password": {"file": "./secrets/password"}}
    assert COMPOSE["services"]["postgres"]["environment"]["POSTGRES_PASSWORD_FILE"]
    text = (INFRA / "compose.yaml").read_text()
    for address in re.findall(r"postgresql\+\w+://([^@]*)@", text):
        assert ":" not in address, "the address of a database has no password in it"
    ignored = (INFRA.parent / ".gitignore").read_text().splitlines()
    assert "infra/secrets/" in ignored


def test_the_dockerfile_copies_what_there_is() -> None:
    text = (INFRA / "docker" / "Dockerfile").read_text()
    copied = re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE)
    assert copied
    for source in " ".join(copied).split():
        assert (INFRA.parent / source).exists(), source
    assert "USER posttrain" in text
    assert os.access(INFRA / "docker" / "with-password", os.R_OK)


def places(value: object) -> Iterator[str]:
    """Every `{{ name }}` in a nested value."""
    if isinstance(value, dict):
        for item in value.values():
            yield from places(item)
    elif isinstance(value, list):
        for item in value:
            yield from places(item)
    elif isinstance(value, str):
        yield from re.findall(r"{{ (\w+) }}", value)


@pytest.mark.parametrize("name", ["base-job-template.json", "base-job-template-ray.json"])
def test_the_kubernetes_template_uses_variables_that_it_declares(name: str) -> None:
    template: dict[str, Any] = json.loads((INFRA / "kubernetes" / name).read_text())
    declared = set(template["variables"]["properties"])
    assert set(places(template["job_configuration"])) == declared
    pod = template["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["terminationGracePeriodSeconds"] >= 60
    # Prefect's worker refuses a job without them, in this place.
    assert pod["parallelism"] == pod["completions"] == 1
    kinds = [
        item["kind"]
        for item in yaml.safe_load_all((INFRA / "kubernetes" / "worker.yaml").read_text())
    ]
    assert {"Deployment", "Role", "PersistentVolumeClaim"} <= set(kinds)


def test_the_job_of_a_run_sets_what_its_ray_cluster_is_made_from() -> None:
    template = json.loads((INFRA / "kubernetes" / "base-job-template-ray.json").read_text())
    pod = template["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    given = {item["name"] for item in container["env"]} | {"CLUSTER", "NAMESPACE"}
    text = (INFRA / "kubernetes" / "ray-cluster.yaml").read_text()
    assert set(re.findall(r"\$\{(\w+)\}", text)) <= given
    secrets = [item for item in container["env"] if item["name"] == "RAY_AUTH_TOKEN"]
    assert [list(item) for item in secrets] == [["name", "valueFrom"]], "by reference"
    assert not any("persistentVolumeClaim" in volume for volume in pod["volumes"])
    made = yaml.safe_load(re.sub(r"\$\{\w+\}", "1", text))
    groups = [made["spec"]["headGroupSpec"], *made["spec"]["workerGroupSpecs"]]
    for group in groups:
        (node,) = group["template"]["spec"]["containers"]
        variables = {item["name"]: item for item in node["env"]}
        assert variables["RAY_AUTH_MODE"]["value"] == "token"
        assert "valueFrom" in variables["RAY_AUTH_TOKEN"]
    roles = yaml.safe_load_all((INFRA / "kubernetes" / "worker-ray.yaml").read_text())
    (role,) = [item for item in roles if item["kind"] == "Role"]
    assert {"create", "delete"} <= set(role["rules"][0]["verbs"])


def test_a_request_says_what_is_wrong_with_it() -> None:
    for wrong in ({"configs": []}, {"configs": ["x"], "seed": -1}, {"configs": ["x"], "hom": "/"}):
        with pytest.raises(ValidationError):
            RunRequest.model_validate(wrong)
    request = RunRequest(configs=["quickstart"], overrides=["seed=1"], seed=5)
    assert request.all_overrides() == ["seed=1", "seed=5"], "the seed of the form wins"


def test_an_evaluation_has_one_stage_and_the_model_that_was_asked_for(
    manager: PluginManager,
) -> None:
    request = EvaluateRequest(configs=["quickstart"], model="/models/a b: 'c'", stage="nightly")
    loaded = load_config(request.paths(), request.all_overrides())
    resolved = resolve(loaded, manager)
    assert resolved.order == ("nightly",)
    assert resolved.config.model.source == "/models/a b: 'c'"
    assert resolved.config.stages["nightly"].kind == "evaluate"
