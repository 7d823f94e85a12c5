"""Continual training: rounds over rows that came since, killed in the middle, and nothing new."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from tests.helpers import killer
from tests.helpers.pipeline import Finished, prepared, run_command, write_config
from tests.helpers.promotion import common, digit_model, sft_stage

pytestmark = pytest.mark.usefixtures("shared_prefect")

HELD_OUT = [f"9{n}" for n in range(10)]


def write_rows(path: Path, prompts: Iterable[str]) -> None:
    lines = [json.dumps({"prompt": p, "answer": p[-1]}) for p in prompts]
    path.write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config whose champion moves whatever the difference: what counts here are the rows."""
    folder = tmp_path_factory.mktemp("continual")
    write_rows(folder / "held_out.jsonl", HELD_OUT)
    config = common("models:/tiny@champion")
    config["model"]["until_registered"] = str(digit_model(folder / "model"))
    paths = {"path": str(folder / "rows.jsonl"), "held_out_path": str(folder / "held_out.jsonl")}
    config["task"] = {"name": "jsonl", **paths}
    config["stages"] = {
        "new_rows": {"kind": "new_data", "min_rows": 2},
        "sft": sft_stage(2) | {"inputs": {"model": "base", "dataset": "new_rows"}},
        "after": {"kind": "evaluate", "inputs": {"model": "sft"}},
        "promote": {
            "kind": "promote",
            "inputs": {"model": "sft", "evaluation": "after"},
            "registered_name": "tiny",
            "min_improvement": -1.0,
        },
    }
    write_config(folder / "run.yaml", config)
    prepared(folder / "home")
    return folder


def run(workspace: Path) -> Finished:
    config, home = workspace / "run.yaml", workspace / "home"
    return run_command("run", str(config), "--home", str(home), "--json")


def rows_of(done: Finished) -> set[str]:
    """The prompts that a run was trained on."""
    (made,) = done.result["stages"]["new_rows"]["artifacts"]
    lines = (Path(made["uri"]) / "problems.jsonl").read_text().splitlines()
    return {json.loads(line)["prompt"] for line in lines}


def versions(workspace: Path) -> dict[str, Any]:
    uri = f"sqlite:///{workspace}/home/mlflow/mlflow.db"
    client = MlflowClient(uri, registry_uri=uri)
    found = client.search_model_versions("name = 'tiny'")
    named = client.get_model_version_by_alias("tiny", "champion")
    return {"all": {str(v.version): v.tags for v in found}, "champion": str(named.version)}


@pytest.mark.slow
@pytest.mark.timeout(1200)  # six runs: minutes where others use the machine
def test_rounds_train_on_new_rows_only_and_a_kill_neither_skips_nor_repeats_one(
    workspace: Path, tmp_path: Path
) -> None:
    early, late, later = ["10", "11", "12"], ["20", "21"], ["30", "31"]
    write_rows(workspace / "rows.jsonl", early)
    first = run(workspace)
    assert first.code == 0, first.text
    assert rows_of(first) == set(early)
    assert versions(workspace)["champion"] == "1"

    nothing = run(workspace)
    assert nothing.code == 0, nothing.text
    assert nothing.result["status"] == "no_new_data" and nothing.result["stages"] == {}
    assert "no new data: 3 rows, 0 of them new since round 1" in nothing.text
    write_rows(workspace / "rows.jsonl", [*early, late[0]])
    few = run(workspace)
    assert few.code == 0 and few.result["status"] == "no_new_data", "one row, min_rows is 2"

    # Killed after the alias moved, before the round was finished; more rows come meanwhile, and
    # those there are lie in another order.
    write_rows(workspace / "rows.jsonl", [*late, *early])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", killer.install(tmp_path / "site"))
        patch.setenv(killer.WHERE, "promote:3")
        killed = run(workspace)
    assert killed.code == -signal.SIGKILL, killed.text
    assert versions(workspace)["champion"] == "2", "this round's own model is the champion already"
    write_rows(workspace / "rows.jsonl", [*later, *early, *late])
    second = run(workspace)
    assert second.code == 0, second.text
    assert "round 2 goes on: 2 rows" in second.text
    assert rows_of(second) == set(late)
    stages = second.result["stages"]
    assert {stages[name]["status"] for name in ("new_rows", "sft")} == {"cached"}
    found = versions(workspace)
    assert set(found["all"]) == {"1", "2"}, "no third model is made from the second"
    assert found["all"]["2"]["posttrain.previous_champion"] == "1"

    uri = second.result["mlflow_uri"]
    made = MlflowClient(uri, registry_uri=uri).search_model_versions("name = 'tiny'")
    second_model = next(v.source for v in made if v.version == 2).removeprefix("models:/")

    third = run(workspace)
    assert third.code == 0, third.text
    assert rows_of(third) == set(later), "rows that came while a round was open are in the next"
    assert versions(workspace)["champion"] == "3"
    began = MlflowClient(third.result["mlflow_uri"]).get_run(third.result["mlflow_run_id"])
    assert began.data.tags["posttrain.base_version"] == "tiny version 2 (champion)"
    learned = third.result["stages"]["sft"]["mlflow_run_id"]
    read = MlflowClient(third.result["mlflow_uri"]).get_run(learned).inputs.model_inputs
    assert [model.model_id for model in read] == [second_model], "the champion is its input"
