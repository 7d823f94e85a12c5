"""avg@k and pass@k in a real rl stage: the same weights with and without, also after a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from posttrain.core.kit.tiny import make_tiny_model
from tests.helpers.pipeline import (
    Finished,
    prepared,
    run_command,
    start_command,
    tiny_config,
    wait_for_step,
    write_config,
)

pytestmark = pytest.mark.usefixtures("shared_prefect")

STEPS, EVERY, K = 5, 2, 4
DUE = [0, 2, 4, 5]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sampled")
    config = tiny_config(make_tiny_model(folder / "model"))
    rl = config["stages"]["rl"] | {"inputs": {"model": "base"}, "rewards": ["accuracy"]}
    config["stages"] = {"rl": rl | {"steps": STEPS}}
    write_config(folder / "without.yaml", config)
    asked = {"every": EVERY, "num_problems": 3, "k": K}
    config["stages"]["rl"] |= {"sampled_evaluation": asked}
    write_config(folder / "with.yaml", config)
    return folder


def run(workspace: Path, config: str, home: Path) -> Finished:
    done = run_command("run", str(workspace / config), "--home", str(home), "--json")
    assert done.code == 0, done.text
    return done


def model_of(done: Finished) -> str:
    artifacts = done.result["stages"]["rl"]["artifacts"]
    return str(next(a["digest"] for a in artifacts if a["kind"] == "model"))


def curve(done: Finished, metric: str) -> list[tuple[int, float]]:
    client = MlflowClient(done.result["mlflow_uri"])
    found = client.get_metric_history(done.result["stages"]["rl"]["mlflow_run_id"], metric)
    return sorted((point.step, point.value) for point in found)


@pytest.mark.slow
def test_the_weights_are_those_without_it_and_a_killed_run_draws_the_same(workspace: Path) -> None:
    plain = run(workspace, "without.yaml", prepared(workspace / "plain"))
    whole = run(workspace, "with.yaml", workspace / "plain")
    assert whole.result["stages"]["rl"]["status"] == "ran"
    assert model_of(whole) == model_of(plain)
    assert curve(plain, f"eval/pass_at/{K}") == []
    for name in ("avg_at", "pass_at", "pass_at_low", "pass_at_high"):
        assert [step for step, _ in curve(whole, f"eval/{name}/{K}")] == DUE
    assert curve(whole, "eval/greedy_accuracy") == curve(plain, "eval/greedy_accuracy")

    home = prepared(workspace / "killed")
    process = start_command("run", str(workspace / "with.yaml"), "--home", str(home), "--plain")
    wait_for_step(home, 3, process)
    process.kill()
    process.wait()
    again = run(workspace, "with.yaml", home)
    assert again.result["stages"]["rl"]["status"] == "resumed"
    assert model_of(again) == model_of(whole)
    for metric in (f"eval/avg_at/{K}", "eval/pass_at/1", "eval/pass_at/2"):
        assert curve(again, metric) == curve(whole, metric)
    assert table(again, 4) == table(whole, 4)


def table(done: Finished, step: int) -> Any:
    """The answers that MLflow shows for a step."""
    client = MlflowClient(done.result["mlflow_uri"])
    run_id = done.result["stages"]["rl"]["mlflow_run_id"]
    path = client.download_artifacts(run_id, f"tables/held_out_sampled/step-{step:06d}.json")
    found = json.loads(Path(path).read_text())
    assert len(found["data"]) == 3 and "right" in found["columns"]
    return found
