"""A gate of a deployed run: suspended without a process, resumed by Prefect's form."""

from __future__ import annotations

from typing import Any

import pytest
from mlflow import MlflowClient

from tests.helpers.pipeline import write_config
from tests.helpers.promotion import ALSO_BAD, digit_model, gated_config
from tests.helpers.services import Services, processes_of

ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


@pytest.fixture(scope="module")
def deployment(services: Services, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("suspension")
    config = gated_config(digit_model(folder / "model")) | {"name": "gated"}
    # The services are other tests' as well, whose runs register "tiny".
    config["stages"]["promote"]["registered_name"] = "gated"
    written = write_config(folder / "run.yaml", config)
    done = services.run("deploy", str(written), "--name", "gated", "--json")
    assert done.code == 0, done.text
    return str(done.result["page"]).rpartition("/")[2]


def trained(services: Services) -> set[str]:
    """The artifacts of supervised learning in the services' store."""
    return {path.name for path in (services.home / "artifacts").glob("sft-*")}


def begin(services: Services, deployment: str, steps: int, *overrides: str) -> str:
    """A flow run of the deployment with that many steps of learning; its id."""
    request = services.ask("GET", f"/deployments/{deployment}")["parameters"]["request"]
    wanted = [f"stages.sft.steps={steps}", *overrides]
    request["overrides"] = [*request.get("overrides", []), *wanted]
    path = f"/deployments/{deployment}/create_flow_run"
    asked = services.ask("POST", path, {"parameters": {"request": request}})
    return str(asked["id"])


def suspended(services: Services, run: str) -> str:
    """What the form of a suspended run shows; there is no process of the run."""
    found = services.flow_run(run, ("PAUSED", *ENDED), seconds=200)
    assert found["state"]["name"] == "Suspended", (found["state"], services.log("worker")[-4000:])
    keys = found["state"]["state_details"]["run_input_keyset"]
    reported: str = services.ask("GET", f"/flow_runs/{run}/input/{keys['description']}")
    return reported


def planned(services: Services, run: str) -> list[Any]:
    """The runs that are to begin when the time for an answer to `run` is over."""
    tags = {"tags": {"all_": [f"nobody-answered:{run}"]}}
    found: list[Any] = services.ask("POST", "/flow_runs/filter", {"flow_runs": tags})
    return found


def resume(services: Services, run: str, answer: dict[str, str]) -> Any:
    return services.ask("POST", f"/flow_runs/{run}/resume", {"run_input": answer})


@pytest.mark.slow
def test_a_suspended_run_waits_without_a_process_and_goes_on_with_the_answer(
    services: Services, deployment: str
) -> None:
    before = set(processes_of(services.home))
    there = trained(services)
    run = begin(services, deployment, 1)
    form = suspended(services, run)
    assert "95 % interval" in form and "before, " in form, "the difference, and samples"
    flows = [line for line in processes_of(services.home) if line not in before]
    assert not [line for line in flows if "flow_run" in line or "prefect.engine" in line], flows
    assert [one["state_type"] for one in planned(services, run)] == ["SCHEDULED"]
    empty = resume(services, run, {})
    assert empty["status"] == "REJECT", "a decision has no default"
    nobody = resume(services, run, {"decision": "approve", "name": ""})
    assert nobody["status"] == "REJECT"
    accepted = resume(services, run, {"decision": "approve", "name": "ada", "reason": "reads well"})
    assert accepted["status"] == "ACCEPT", accepted
    done = services.flow_run(run, ENDED, seconds=200)
    assert done["state_type"] == "COMPLETED", (done["state"], services.log("worker")[-4000:])
    client = MlflowClient(services.mlflow_uri, registry_uri=services.mlflow_uri)
    tags = approvals(client)
    assert tags[-1]["posttrain.approval.by"] == "ada"
    assert tags[-1]["posttrain.approval.given"] == "prefect"
    assert tags[-1]["posttrain.approval.reason"] == "reads well"
    assert client.get_model_version_by_alias("gated", "champion").version == "1"
    assert len(trained(services) - there) == 1, "not computed again when it was resumed"
    assert planned(services, run) == [], "it was answered"


@pytest.mark.slow
def test_a_rejection_ends_the_run_and_what_was_computed_stays(
    services: Services, deployment: str
) -> None:
    there = trained(services)
    run = begin(services, deployment, ALSO_BAD)
    suspended(services, run)
    answer = {"decision": "reject", "name": "bob", "reason": "says nothing right"}
    assert resume(services, run, answer)["status"] == "ACCEPT"
    done = services.flow_run(run, ENDED, seconds=200)
    assert done["state_type"] == "FAILED", done["state"]
    assert "rejected by bob" in done["state"]["message"]
    assert "says nothing right" in done["state"]["message"]
    assert len(trained(services) - there) == 1
    client = MlflowClient(services.mlflow_uri, registry_uri=services.mlflow_uri)
    assert approvals(client)[-1]["posttrain.approval.decision"] == "rejected"
    assert client.get_model_version_by_alias("gated", "champion").version == "1"


SOON = ("stages.gate.timeout_hours=0.005", "stages.gate.on_timeout=approve")
"""Eighteen seconds for an answer."""


@pytest.mark.slow
def test_no_answer_in_time_is_what_the_config_says_without_a_run_of_the_command(
    services: Services, deployment: str
) -> None:
    there = trained(services)
    run = begin(services, deployment, 3, *SOON)
    suspended(services, run)
    (follower,) = planned(services, run)
    done = services.flow_run(follower["id"], ENDED, seconds=200)
    assert done["state_type"] == "COMPLETED", (done["state"], services.log("worker")[-4000:])
    asked = services.flow_run(run, ENDED, seconds=30)
    assert asked["state_type"] == "FAILED" and "never resumed" in asked["state"]["message"]
    assert len(trained(services) - there) == 1, "the model of the run that asked"
    client = MlflowClient(services.mlflow_uri, registry_uri=services.mlflow_uri)
    tags = approvals(client)[-1]
    assert tags["posttrain.approval.decision"] == "approved"
    assert tags["posttrain.approval.by"] == "nobody"
    assert tags["posttrain.approval.given"] == "timeout"
    again = services.ask("POST", f"/flow_runs/{run}/set_state", {"state": {"type": "SCHEDULED"}})
    assert again["status"] == "ACCEPT", again
    retried = services.flow_run(run, ("COMPLETED", "CRASHED", "CANCELLED"), seconds=200)
    assert retried["state_type"] == "COMPLETED", (retried["state"], services.log("worker")[-4000:])


@pytest.mark.slow
def test_a_cancelled_run_is_not_approved_by_the_end_of_its_time(
    services: Services, deployment: str
) -> None:
    run = begin(services, deployment, 4, *SOON)
    suspended(services, run)
    cancel = {"state": {"type": "CANCELLED", "name": "Cancelled"}, "force": True}
    assert services.ask("POST", f"/flow_runs/{run}/set_state", cancel)["status"] == "ACCEPT"
    (follower,) = planned(services, run)
    done = services.flow_run(follower["id"], ENDED, seconds=200)
    assert done["state_type"] == "CANCELLED", done["state"]
    assert run in done["state"]["message"]


def approvals(client: MlflowClient) -> list[dict[str, str]]:
    """Tags of the runs of the gate that has an answer, in the order they began."""
    experiment = client.get_experiment_by_name("gated")
    assert experiment is not None
    found = client.search_runs(
        [experiment.experiment_id],
        "tags.`posttrain.approval.by` != ''",
        order_by=["attributes.start_time ASC"],
    )
    return [run.data.tags for run in found]
