"""A package of somebody else: two stages, an optimizer and a command, installed by pip.

Its stages are nodes of the DAG like the built-in ones: in `plan`, in identities, in Prefect and in
MLflow. Its optimizer trains, and goes on bit for bit after a kill.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow import MlflowClient
from safetensors.torch import load_file

from posttrain.core.kit.tiny import make_tiny_model
from tests.helpers import killer
from tests.helpers.pipeline import Finished, environment, prepared, run_loaded, write_config

LAB = Path(__file__).resolve().parents[1] / "data" / "lab-plugin"


@dataclass(frozen=True)
class Lab:
    """A folder with the package installed, the config that uses it, and its finished run."""

    folder: Path
    site: Path
    variables: dict[str, str]
    done: Finished

    @property
    def config(self) -> str:
        return str(self.folder / "run.yaml")

    def command(self, *arguments: str, home: str = "home", **more: str) -> Finished:
        given = ("--home", str(self.folder / home), "--json")
        return run_loaded(*arguments, *given, variables=self.variables | more)


def lab_config(model: Path) -> dict[str, Any]:
    lion = {"name": "lion", "learning_rate": 1e-3, "betas": [0.95, 0.98]}
    sft = {"kind": "sft", "steps": 4, "batch_size": 4, "checkpoint_every": 1, "optimizer": lion}
    return {
        "name": "lab",
        "engine": "transformers",
        "model": {"source": str(model), "dtype": "float32", "max_model_len": 128},
        "task": {"name": "arithmetic", "left_digits": [1, 1], "right_digits": [1, 1]},
        "evaluation": {"num_problems": 4, "max_response_length": 8, "num_samples": 0},
        "limits": {"num_threads": 1},
        "stages": {
            "even": {"kind": "keep_even", "count": 24},
            "sft": {**sft, "inputs": {"model": "base", "dataset": "even"}},
            "merged": {"kind": "merge", "inputs": {"model": "sft", "other": "base"}},
            "evaluate": {"kind": "evaluate", "inputs": {"model": "merged"}},
        },
    }


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    folder = tmp_path_factory.mktemp("lab")
    site, source = folder / "site", folder / "source"
    shutil.copytree(LAB, source)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(site), str(source)], check=True, timeout=120)
    path = os.pathsep.join([str(site), killer.install(folder / "killer")])
    write_config(folder / "run.yaml", lab_config(make_tiny_model(folder / "model")))
    prepared(folder / "home")
    variables = {"PYTHONPATH": path}
    lab = Lab(folder, site, variables, Finished(1, "", {}))
    done = lab.command("run", lab.config)
    assert done.code == 0, done.text
    return Lab(folder, site, variables, done)


def test_a_stage_of_another_package_is_a_node_like_ours(lab: Lab) -> None:
    stages = lab.done.result["stages"]
    assert {name: stage["status"] for name, stage in stages.items()} == {
        name: "ran" for name in ("even", "sft", "merged", "evaluate")
    }
    (data,), (model,) = stages["even"]["artifacts"], stages["merged"]["artifacts"]
    assert (data["kind"], model["kind"]) == ("dataset", "model")
    rows = (Path(data["uri"]) / "problems.jsonl").read_text().splitlines()
    assert rows and all(int(json.loads(row)["answer"]) % 2 == 0 for row in rows)
    trained = load_file(Path(stages["sft"]["artifacts"][0]["uri"]) / "model.safetensors")
    base = load_file(lab.folder / "model" / "model.safetensors")
    merged = load_file(Path(model["uri"]) / "model.safetensors")
    name = next(name for name in merged if name.endswith("q_proj.weight"))
    assert not torch.equal(trained[name], base[name])
    torch.testing.assert_close(merged[name], (trained[name] + base[name]) / 2)


def test_mlflow_and_prefect_have_it(lab: Lab) -> None:
    client = MlflowClient(f"sqlite:///{lab.folder}/home/mlflow/mlflow.db")
    parent = lab.done.result["mlflow_run_id"]
    children = {
        run.info.run_name: run
        for run in client.search_runs(
            [client.get_run(parent).info.experiment_id],
            f"tags.`mlflow.parentRunId` = '{parent}'",
        )
    }
    even = children["even"]
    assert even.data.metrics["plugin/seen"] == 24 and even.data.params["count"] == "24"
    assert [
        model.name
        for model in client.search_logged_models([client.get_run(parent).info.experiment_id])
        if model.name == "merged"
    ]
    database = sqlite3.connect(f"file:{lab.folder}/home/prefect/prefect.db?mode=ro", uri=True)
    tasks = {name for (name,) in database.execute("select name from task_run")}
    assert {"even", "merged"} <= tasks


@pytest.mark.usefixtures("reports_to_shared_prefect")
def test_it_is_reused_until_its_source_changes(lab: Lab) -> None:
    again = lab.command("run", lab.config)
    assert {stage["status"] for stage in again.result["stages"].values()} == {"cached"}, again.text
    code = lab.site / "posttrain_lab" / "plugins.py"
    before = code.read_text()
    try:
        code.write_text(before + "\n# edited\n")
        edited = lab.command("plan", lab.config, "--device", "cpu")
    finally:
        code.write_text(before)
    rows = {row["stage"]: row for row in edited.result["stages"]}
    assert "source of stage plugin keep_even changed" in rows["even"]["reason"]
    assert "source of optimizer plugin lion changed" in rows["sft"]["reason"]
    assert not rows["merged"]["cached"]
    assert rows["even"]["arithmetic"] == "looks at 24 problems"
    assert (rows["even"]["kind"], rows["even"]["makes"]) == ("keep_even", "dataset")
    assert rows["merged"]["disk_gb"] > 0 and "seconds" not in rows["even"]
    assert "Not estimated, and not in the totals: even." in edited.text


@pytest.mark.slow
def test_its_optimizer_goes_on_bit_for_bit_after_a_kill(lab: Lab) -> None:
    killed = lab.command("run", lab.config, home="killed", **{killer.WHERE: "sft:2"})
    assert killed.code == -9, killed.text
    done = lab.command("run", lab.config, home="killed")
    stages = done.result["stages"]
    assert stages["sft"]["status"] == "resumed", done.text
    whole = lab.done.result["stages"]
    for name in ("even", "sft", "merged"):
        digests = [each[name]["artifacts"][0]["digest"] for each in (stages, whole)]
        assert digests[0] == digests[1], name


def test_its_command_is_one_of_ours(lab: Lab) -> None:
    def posttrain(*arguments: str) -> str:
        command = [sys.executable, "-m", "posttrain.pipelines.cli", *arguments]
        env = environment() | lab.variables
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
        return done.stdout + done.stderr

    assert "lab-note" in posttrain("--help")
    assert posttrain("lab-note", "hello") == "lab: hello\n"
