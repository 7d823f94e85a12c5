"""Links, names and texts of the pages that a run leaves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from posttrain.core.config.schema import RunConfig
from posttrain.core.errors import ConfigError
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.store.artifacts import RunResult
from posttrain.core.tracking.registry import how_to_load
from posttrain.pipelines.deploy import deployments
from posttrain.pipelines.deploy.forms import RunRequest
from posttrain.pipelines.run.pipeline import algorithms_of
from posttrain.pipelines.run.summary import links, opened_by, to_json


def result(uri: str) -> RunResult:
    return RunResult("r1", "completed", {}, uri, "r1", "7", "f1", Path("/home"), 1.0)


def test_links_open_mlflows_training_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "https://me:pass-word-1@prefect.example/api")
    pages = links(result("sqlite:////home/mlflow/mlflow.db"))
    page = "/#/experiments/7/runs/r1?workflowType=machine_learning"
    assert pages["mlflow"] == f"http://127.0.0.1:5000{page}"
    assert pages["prefect"] == "https://prefect.example/runs/flow-run/f1"
    assert "posttrain ui --home /home" in opened_by(pages, Path("/home"))
    remote = result("https://me:pass-word-1@mlflow.example/")
    pages = links(remote)
    assert pages["mlflow"] == f"https://mlflow.example{page}"
    assert opened_by(pages, Path("/home")) == ""
    assert "pass-word-1" not in str(to_json(remote))


@pytest.mark.parametrize("kind", ["model", "reward_model"])
def test_the_code_on_a_models_page_loads_the_model(tmp_path: Path, kind: str) -> None:
    folder = make_tiny_model(tmp_path / kind)
    (code,) = re.findall(r"```python\n(.*?)```", how_to_load(str(folder)), re.S)
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102 - it is our own
    ranks = kind == "reward_model"
    assert type(names["model"]).__name__.endswith(
        "ForSequenceClassification" if ranks else "ForCausalLM"
    )
    assert names["tokenizer"]("1+1")["input_ids"]


def test_a_run_is_named_after_its_algorithms() -> None:
    stages = {
        "a": {"kind": "sft"},
        "b": {"kind": "preference", "data": "x.jsonl", "algorithm": "ipo"},
        "c": {"kind": "rl", "algorithm": "dapo", "rewards": ["accuracy"]},
        "d": {"kind": "preference", "data": "x.jsonl", "algorithm": "ipo"},
    }
    assert algorithms_of(RunConfig.model_validate({"stages": stages})) == "ipo dapo"
    assert algorithms_of(RunConfig.model_validate({"stages": {"a": stages["a"]}})) == ""


def test_a_deployment_does_not_put_a_password_on_prefects_pages() -> None:
    request = RunRequest(configs=["quickstart"], overrides=["engine.url=http://u:pass-word-1@h"])
    with pytest.raises(ConfigError, match="holds a password or a token") as refused:
        deployments.check(deployments.Wanted("train", "x", request))
    assert "pass-word-1" not in str(refused.value)
