"""A run with a benchmark, `posttrain eval` on what it made, and both in `posttrain compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from posttrain.core.kit.tiny import make_tiny_model
from tests.helpers.benchmarks import write_benchmarks
from tests.helpers.pipeline import prepared, run_command, tiny_config, write_config

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'posttrain[eval]'")
pytest.importorskip(
    "inspect_ai", reason="inspect-ai is not installed: pip install 'posttrain[eval]'"
)


@pytest.mark.slow
def test_a_run_is_measured_by_a_stage_and_by_the_command(tmp_path: Path) -> None:
    tasks, home = write_benchmarks(tmp_path / "tasks"), prepared(tmp_path / "home")
    config: dict[str, Any] = tiny_config(make_tiny_model(tmp_path / "model"))
    config["stages"] = {
        "sft": config["stages"]["sft"],
        "bench": {
            "kind": "benchmark",
            "inputs": {"model": "sft"},
            "suites": ["lm_eval:capitals", f"inspect:{tasks}/sums.py@echo"],
            "tasks_dir": str(tasks),
            "limit": 4,
        },
    }
    path, at_home = write_config(tmp_path / "run.yaml", config), ("--home", str(home))
    first = run_command("run", str(path), *at_home, "--json").result
    bench = first["stages"]["bench"]
    assert bench["status"] == "ran"
    assert bench["metrics"]["suite/inspect/echo/accuracy"] == 1.0
    assert {item["kind"] for item in bench["artifacts"]} == {"report"}

    (tasks / "sums.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    config["seed"] = 1
    write_config(path, config)
    second = run_command("run", str(path), *at_home, "--json").result
    assert second["stages"]["bench"]["status"] == "ran"
    again = run_command("run", str(path), *at_home, "--json").result
    assert again["stages"]["bench"]["status"] == "cached"

    done = run_command("eval", first["run_id"], "--suite", "held_out", *at_home, "--json")
    assert done.code == 0, done.text
    parent = first["mlflow_run_id"]
    client = MlflowClient(first["mlflow_uri"], first["mlflow_uri"])
    child = client.get_run(done.result["mlflow_run_id"])
    assert child.data.tags["mlflow.parentRunId"] == parent
    assert child.data.tags["posttrain.evaluated_stage"] == "sft"

    compared = run_command("compare", first["run_id"], second["run_id"], *at_home, "--json").result
    measured = [{m["key"] for m in run["suites"]} for run in compared["runs"]]
    assert measured[0] - measured[1] == {
        "held_out/arithmetic/accuracy",
        "held_out/arithmetic/sampled_accuracy",
    }
    assert measured[1] == {"lm_eval/capitals/acc", "inspect/echo/accuracy"}
