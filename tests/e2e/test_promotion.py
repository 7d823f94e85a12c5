"""A gate, a promotion, a kill between its two halves, a rollback: one home, reported in order."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from typer.testing import CliRunner

from posttrain.pipelines.cli.main import app
from tests.helpers import killer
from tests.helpers.pipeline import Finished, prepared, run_command, write_config
from tests.helpers.promotion import (
    ALSO_BAD,
    BAD,
    GOOD,
    at_a_terminal,
    digit_model,
    gated_config,
)

pytestmark = pytest.mark.usefixtures("shared_prefect")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("promotion")
    write_config(folder / "run.yaml", gated_config(digit_model(folder / "model")))
    prepared(folder / "home")
    return folder


def run(workspace: Path, steps: int, *more: str) -> Finished:
    return run_command(*arguments(workspace, steps), *more, "--json")


def arguments(workspace: Path, steps: int) -> list[str]:
    given = ["--set", f"stages.sft.steps={steps}", "--home", str(workspace / "home")]
    return ["run", str(workspace / "run.yaml"), *given]


def client(workspace: Path) -> MlflowClient:
    uri = f"sqlite:///{workspace}/home/mlflow/mlflow.db"
    return MlflowClient(uri, registry_uri=uri)


def versions(workspace: Path) -> dict[str, Any]:
    found = client(workspace).search_model_versions("name = 'tiny'")
    return {str(version.version): version for version in found}


def champion(workspace: Path) -> str:
    return str(client(workspace).get_model_version_by_alias("tiny", "champion").version)


def record(done: Finished) -> dict[str, Any]:
    (made,) = done.result["stages"]["promote"]["artifacts"][:1]
    reported: dict[str, Any] = json.loads(Path(made["uri"]).read_text())
    return reported


@pytest.fixture(scope="module")
def waited(workspace: Path) -> Finished:
    return run(workspace, BAD)


@pytest.fixture(scope="module")
def rejected(workspace: Path, waited: Finished) -> Finished:
    return run(workspace, BAD, "--reject", "gate", "--reason", "says nothing right")


@pytest.fixture(scope="module")
def first(workspace: Path, rejected: Finished) -> Finished:
    done = run(workspace, BAD, "--approve", "gate", "--reason", "to begin with")
    assert done.code == 0, done.text
    return done


@pytest.fixture(scope="module")
def better(workspace: Path, first: Finished, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Killed between registering the version and moving the alias, then run again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", killer.install(tmp_path_factory.mktemp("site")))
        patch.setenv(killer.WHERE, "promote:2")
        killed = run(workspace, GOOD, "--approve", "all")
    assert killed.code == -signal.SIGKILL, killed.text
    assert set(versions(workspace)) == {"1", "2"}, "registered"
    assert champion(workspace) == "1", "the alias was not moved yet"
    done = run(workspace, GOOD)
    assert done.code == 0, done.text
    return done


def test_without_an_answer_the_run_ends_and_says_how_to_answer(
    workspace: Path, waited: Finished
) -> None:
    assert waited.code == 5, waited.text
    assert waited.result["status"] == "waiting" and waited.result["stage"] == "gate"
    command = waited.result["commands"]["approve"]
    assert command.startswith("posttrain run ") and "--approve gate" in command
    assert "stages.sft.steps=1" in command and str(workspace / "home") in command
    assert command in waited.text and "Traceback" not in waited.text
    evidence = waited.result["evidence"]
    assert "95 % interval" in evidence and "of 32 problems" in evidence
    assert evidence.count("- before, ") == 2, "two samples"
    made = {path.name.rsplit("-", 1)[0] for path in (workspace / "home" / "artifacts").iterdir()}
    assert {"before", "sft", "after"} <= made


def test_a_rejection_is_told_and_kept_with_who_when_and_why(
    workspace: Path, rejected: Finished
) -> None:
    assert rejected.code == 6, rejected.text
    assert rejected.result["status"] == "rejected"
    assert "says nothing right" in rejected.result["error"]
    runs = client(workspace).search_runs(
        [e.experiment_id for e in client(workspace).search_experiments()],
        "tags.`posttrain.approval.decision` = 'rejected'",
    )
    (reported,) = (found.data.tags for found in runs)
    assert reported["posttrain.approval.reason"] == "says nothing right"
    assert "@" in reported["posttrain.approval.by"] and "T" in reported["posttrain.approval.at"]
    assert not client(workspace).search_registered_models(), "nothing behind the gate was done"


def test_an_answer_changes_only_by_another_and_the_first_model_is_champion(
    workspace: Path, first: Finished
) -> None:
    status = {name: stage["status"] for name, stage in first.result["stages"].items()}
    cached = {name: "cached" for name in ("before", "sft", "after")}
    assert status == cached | {"gate": "ran", "promote": "ran"}
    gate = next(a for a in first.result["stages"]["gate"]["artifacts"] if a["kind"] == "approval")
    answer = json.loads((Path(gate["uri"]) / "approval.json").read_text())
    assert answer["approved"] is True and answer["reason"] == "to begin with"
    sft = first.result["stages"]["sft"]["artifacts"][0]
    assert answer["model_digest"] == sft["digest"]
    passed = next(a for a in first.result["stages"]["gate"]["artifacts"] if a["kind"] == "model")
    assert passed == sft, "the gate hands on the model that it read"
    assert champion(workspace) == "1"
    assert "it is the first" in record(first)["reason"]
    assert versions(workspace)["1"].tags["digest"] == sft["digest"]


def test_a_kill_between_registering_and_moving_registers_once_and_loses_nothing(
    workspace: Path, better: Finished
) -> None:
    found = versions(workspace)
    assert set(found) == {"1", "2"} and champion(workspace) == "2"
    assert found["2"].tags["posttrain.previous_champion"] == "1"
    reported = record(better)
    assert (
        reported["promoted"] and reported["version"] == "2" and reported["previous_version"] == "1"
    )
    compared = reported["comparison"]
    assert compared["low"] > 0 and compared["gained"] > 16 and compared["num_problems"] == 32
    assert better.result["stages"]["promote"]["metrics"]["promote/low"] == compared["low"]
    assert better.result["stages"]["gate"]["status"] == "cached", "its answer stands"


@pytest.mark.slow
def test_an_old_answer_is_for_no_other_model_and_a_worse_one_moves_nothing(
    workspace: Path, better: Finished
) -> None:
    """Another model is asked for again, at a terminal this time."""
    typed = {"approve or reject?": "approve", "why?": "let us see"}
    code, screen = at_a_terminal(arguments(workspace, ALSO_BAD), typed)
    assert code == 0, screen
    assert "asks for approval" in screen and "of 32 problems" in screen
    assert "not promoted" in screen and "is not above +0.0" in screen
    assert champion(workspace) == "2" and set(versions(workspace)) == {"1", "2"}


def rollback(workspace: Path, *given: str, code: int = 0) -> dict[str, Any]:
    """The command in this process; its JSON object."""
    home = ["--home", str(workspace / "home"), "--json"]
    done = CliRunner().invoke(app, ["rollback", *given, *home])
    assert done.exit_code == code, done.output
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_a_rollback_goes_to_the_champion_before_and_is_not_undone_by_a_run(
    workspace: Path, better: Finished
) -> None:
    back = rollback(workspace, "tiny", "--reason", "too slow")
    assert (back["before"], back["now"]) == ("2", "1")
    assert champion(workspace) == "1"
    mark = json.loads(versions(workspace)["2"].tags["posttrain.rolled_back"])
    assert mark["reason"] == "too slow" and "@" in mark["by"]
    assert "it is the first champion" in rollback(workspace, "tiny", code=1)["error"]
    assert "did you mean 'tiny'" in rollback(workspace, "tinny", code=4)["error"]
    same = run(workspace, GOOD)
    assert same.code == 0 and not record(same)["promoted"], same.text
    assert "took back" in record(same)["reason"] and champion(workspace) == "1"
    rollback(workspace, "tiny", "--to", "2")
    assert champion(workspace) == "2"
    assert "posttrain.rolled_back" not in versions(workspace)["2"].tags
