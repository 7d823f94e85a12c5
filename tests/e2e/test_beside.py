"""Runs next to each other in one home: no stage is computed twice, nothing gets in the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.helpers.pipeline import start_command, tiny_config, write_config
from tests.helpers.tiny import make_tiny_model

RUNS = ("seed=0", "seed=0", "seed=1")


@pytest.mark.timeout(600)
def test_three_runs_at_once_in_a_new_home(tmp_path: Path) -> None:
    """Two of one config, one with another seed; even the databases are made by whoever is first."""
    config = write_config(tmp_path / "run.yaml", tiny_config(make_tiny_model(tmp_path / "model")))
    home = tmp_path / "home"
    started = [
        start_command("run", str(config), "--set", seed, "--home", str(home), "--json")
        for seed in RUNS
    ]
    texts = [process.communicate(timeout=500)[0] for process in started]
    for process, text in zip(started, texts, strict=True):
        assert process.returncode == 0, text[-4000:]
    results = [json.loads(text.strip().splitlines()[-1]) for text in texts]
    first, second, other = (result["stages"] for result in results)
    for name, stage in first.items():
        assert sorted((stage["status"], second[name]["status"])) == ["cached", "ran"]
        assert stage["artifacts"] == second[name]["artifacts"]
        assert other[name]["status"] == "ran"
    assert first["rl"]["artifacts"][0]["digest"] != other["rl"]["artifacts"][0]["digest"]
    client = MlflowClient(results[0]["mlflow_uri"])
    for stages in (first, other):  # a cached stage names the run that computed it
        rewards = client.get_metric_history(stages["rl"]["mlflow_run_id"], "reward/mean")
        assert [point.step for point in rewards] == [1, 2, 3, 4]
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert not list((home / "artifacts").glob(".partial-*"))
