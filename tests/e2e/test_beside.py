"""Runs next to each other in one home: no stage is computed twice, nothing gets in the way."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from mlflow import MlflowClient

from posttrain.core.kit.tiny import make_tiny_model
from tests.helpers.pipeline import (
    COMMAND,
    environment,
    prepared,
    run_command,
    start_command,
    tiny_config,
    wait_for_step,
    write_config,
)

RUNS = ("seed=0", "seed=0", "seed=1")


@pytest.mark.timeout(600)
@pytest.mark.slow
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


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_a_run_leaves_that_of_another_container_alone(tmp_path: Path) -> None:
    """One home, one host name, two process namespaces: neither sees the other's process."""
    container = ["unshare", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*container, "true"]).returncode:
        pytest.skip("no new namespace can be made here")
    made = tiny_config(make_tiny_model(tmp_path / "model"))
    rl = made["stages"]["rl"] | {"inputs": {"model": "base"}, "rewards": ["accuracy"], "steps": 60}
    config = write_config(tmp_path / "run.yaml", {**made, "stages": {"rl": rl}})
    home = prepared(tmp_path / "home")
    arguments = ["run", str(config), "--home", str(home), "--json"]
    with subprocess.Popen(
        [*container, *COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    ) as elsewhere:
        wait_for_step(home, 1, elsewhere)
        (partial,) = (p for p in (home / "artifacts").glob(".partial-*") if p.is_dir())
        done = run_command(*arguments, "--set", "stages.rl.steps=1", "--set", "seed=1")
        assert done.code == 0, done.text
        assert partial.is_dir() or elsewhere.poll() is not None
        text = elsewhere.communicate(timeout=500)[0]
        assert elsewhere.returncode == 0, text[-4000:]
    client = MlflowClient(done.result["mlflow_uri"])
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert {run.info.status for run in runs} == {"FINISHED"} and len(runs) == 4
    assert not list((home / "artifacts").glob(".partial-*"))
    assert not list((home / "runs").glob(".alive-*"))
