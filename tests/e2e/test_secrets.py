"""A secret in URLs and in the environment is in nothing that a run prints, stores or shows."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from posttrain.core.kit.tiny import make_tiny_model
from tests.helpers.pipeline import prepared, run_command, run_loaded, tiny_config, write_config
from tests.helpers.plugin_site import offer

SECRET = "s3cr3t-Hunter2"
URL = f"http://user:{SECRET}@127.0.0.1:9"
BREAKS = f'''
import logging
from posttrain.core.hooks import hookimpl

@hookimpl
def posttrain_on_stage_end(stage, status, metrics):
    """As a client library would: it prints and logs the address, and fails."""
    print("connected to", "{URL}/api")
    logging.getLogger("client").error("retrying %s", "{URL}/api")
    try:
        raise OSError(111, "no answer from {URL}")
    except OSError as error:
        raise RuntimeError("cannot report to {URL}?token={SECRET}") from error
'''


def test_a_failed_run_shows_its_links_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(tmp_path, "breaks", BREAKS, monkeypatch)
    config = tiny_config(make_tiny_model(tmp_path / "model"))
    rl = config["stages"]["rl"] | {"inputs": {"model": "base"}, "rewards": ["accuracy"]}
    config["stages"] = {"rl": rl | {"steps": 1, "evaluate_every": 0}}
    config |= {"keep": {"traces_every": 1}, "description": f"as {URL}/wiki says"}
    path = write_config(tmp_path / "run.yaml", config)
    checkout = tmp_path / "checkout"
    remote = f"https://{SECRET}@github.com/owner/name.git"
    subprocess.run(["git", "init", "-q", str(checkout)], check=True)
    subprocess.run(["git", "-C", str(checkout), "remote", "add", "origin", remote], check=True)
    monkeypatch.chdir(checkout)
    home = prepared(tmp_path / "home")
    variables = {"HF_TOKEN": f"plain-{SECRET}", "HTTPS_PROXY": URL, "NO_PROXY": "127.0.0.1"}
    given = ["--home", str(home), "--set", "limits.stall_minutes=5", "--json", "--debug"]
    done = run_command("run", str(path), *given, variables=variables)
    assert done.code == 1, done.text
    assert SECRET not in done.text
    assert "cannot report to http://***@127.0.0.1:9" in done.result["error"]
    assert "/runs/" in done.text and "workflowType=machine_learning" in done.text
    assert "/runs/flow-run/" in done.text and "posttrain ui --home" in done.text
    files = [file for file in home.rglob("*") if file.is_file()]
    assert any(file.name == "prefect.db" for file in files) and len(files) > 20
    assert not [str(file) for file in files if SECRET.encode() in file.read_bytes()]
    card = next(home.rglob("run_card.md")).read_text()
    assert "the run failed" in card and "http://***@127.0.0.1:9/wiki" in card


def test_a_server_that_does_not_answer_is_named_without_its_password(tmp_path: Path) -> None:
    path = write_config(tmp_path / "run.yaml", tiny_config(make_tiny_model(tmp_path / "model")))
    variables = {
        "MLFLOW_TRACKING_URI": URL,
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "2",
    }
    home = tmp_path / "home"
    done = run_loaded(
        "run", str(path), "--home", str(home), "--json", "--debug", variables=variables
    )
    assert done.code != 0 and json.dumps(done.result)
    assert SECRET not in done.text and "MLflow at http://127.0.0.1:9" in done.text
    assert not [f for f in home.rglob("*") if f.is_file() and SECRET.encode() in f.read_bytes()]


@pytest.mark.slow
def test_the_processes_of_a_sweep_write_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(tmp_path, "breaks", BREAKS, monkeypatch)
    config = tiny_config(make_tiny_model(tmp_path / "model"))
    config["stages"] = {"evaluate_base": config["stages"]["evaluate_base"]}
    shorter = {"set": {"evaluation.max_response_length": 4}}
    config["variants"] = {"named": {"short": shorter}}
    path, home = write_config(tmp_path / "run.yaml", config), prepared(tmp_path / "home")
    variables = {"HF_TOKEN": f"plain-{SECRET}", "NO_PROXY": "127.0.0.1"}
    done = run_command("sweep", str(path), "--home", str(home), "--json", variables=variables)
    assert done.code == 1 and done.result["failed"] > 0, done.text
    assert SECRET not in done.text
    log = next(home.glob("sweeps/*/worker-1.log")).read_text()
    assert "connected to http://***@127.0.0.1:9/api" in log
    assert "cannot report to http://***@127.0.0.1:9" in log
    files = [file for file in home.rglob("*") if file.is_file()]
    assert not [str(file) for file in files if SECRET.encode() in file.read_bytes()]
