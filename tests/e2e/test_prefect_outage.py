"""Prefect's server is killed in the middle of RL, and how much a step adds to its database."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import time
from pathlib import Path

import psutil

from tests.helpers.pipeline import (
    COMMAND,
    environment,
    prepared,
    run_command,
    tiny_config,
    write_config,
)
from tests.helpers.tiny import make_tiny_model

STEPS = 100
MOST_BYTES_A_STEP = 10_000
EXIT_S = 60.0


def _config(folder: Path) -> Path:
    """RL and an evaluation after it; nothing writes a checkpoint."""
    config = tiny_config(make_tiny_model(folder / "model"))
    rl = config["stages"]["rl"]
    rl |= {"steps": STEPS, "checkpoint_every": 0, "evaluate_every": 0, "prompts_per_step": 2}
    rl |= {"inputs": {"model": "base"}, "rewards": ["accuracy"], "num_mini_batches": 1}
    evaluate = {"kind": "evaluate", "inputs": {"model": "rl"}}
    config["stages"] = {"rl": rl, "evaluate": evaluate}
    return write_config(folder / "outage.yaml", config)


def test_a_step_adds_ten_kilobytes_at_most(tmp_path: Path) -> None:
    home = prepared(tmp_path / "home")
    database = home / "prefect" / "prefect.db"
    before = database.stat().st_size
    done = run_command("run", str(_config(tmp_path)), "--home", str(home), "--json")
    assert done.code == 0, done.text
    with sqlite3.connect(database) as connection:
        names = [name for (name,) in connection.execute("select name from task_run")]
    assert sum(name.startswith("update_policy") for name in names) == 1
    assert {"rl", "evaluate", "steps 2 to 11", "steps 92 to 100"} <= set(names)
    assert (database.stat().st_size - before) / STEPS <= MOST_BYTES_A_STEP


def test_a_killed_server_ends_no_run(tmp_path: Path) -> None:
    home = tmp_path / "home"
    run = subprocess.Popen(
        [*COMMAND, "run", str(_config(tmp_path)), "--home", str(home), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    _wait_for_step(home, 8)
    _server_of(run.pid).send_signal(signal.SIGKILL)
    out, said = run.communicate(timeout=240)
    ended = time.time()
    assert run.returncode == 0, said
    result = json.loads(out.strip().splitlines()[-1])
    assert result["status"] == "completed"
    assert {name: stage["status"] for name, stage in result["stages"].items()} == {
        "rl": "ran",
        "evaluate": "ran",
    }
    assert said.count("Prefect's server does not answer") == 1
    assert "Traceback" not in said
    last = max(path.stat().st_mtime for path in (home / "runs").rglob("metrics-*.jsonl"))
    assert ended - last < EXIT_S


def _wait_for_step(home: Path, step: int) -> None:
    ends = time.monotonic() + 120
    while time.monotonic() < ends:
        for path in (home / "runs").glob("metrics-rl*.jsonl"):
            if f'"step":{step},' in path.read_text():
                return
        time.sleep(0.05)
    raise AssertionError(f"no step {step} within two minutes")


def _server_of(pid: int) -> psutil.Process:
    for child in psutil.Process(pid).children(recursive=True):
        if "posttrain.pipelines.run.prefect_program" in child.cmdline():
            return child
    raise AssertionError("the run has no server")
