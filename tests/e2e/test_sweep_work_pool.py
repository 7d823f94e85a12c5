"""`posttrain sweep --work-pool`: branches as runs of a Prefect work pool, by a real worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient

from posttrain.pipelines.sweep.record import SweepRecord
from tests.e2e.test_sweep import VARIANTS, record_of, sweep_config
from tests.helpers import stopped_sweep
from tests.helpers.pipeline import (
    environment,
    prepared,
    run_command,
    start_command,
    write_config,
)
from tests.helpers.services import Services
from tests.helpers.sweeps import made

REPOSITORY = Path(__file__).parents[2]
UNFINISHED = ["SCHEDULED", "PENDING", "RUNNING", "CANCELLING"]


@pytest.fixture(scope="module")
def pool(services: Services) -> Iterator[str]:
    """The pool of the services' worker, which runs two at once for as long as this file runs."""
    services.ask("PATCH", "/work_pools/posttrain", {"concurrency_limit": 2})
    yield "posttrain"
    services.ask("PATCH", "/work_pools/posttrain", {"concurrency_limit": 1})


def runs_of_branches(services: Services, states: list[str]) -> list[Any]:
    wanted = {
        "flows": {"name": {"any_": ["sweep_branch"]}},
        "flow_runs": {"state": {"type": {"any_": states}}},
    }
    found: list[Any] = services.ask("POST", "/flow_runs/filter", wanted)
    return found


@pytest.mark.slow
def test_a_pool_makes_what_one_process_makes_and_shared_stages_run_once(
    services: Services, pool: str, tmp_path: Path
) -> None:
    no_room = {"no room": {"set": {"limits.min_free_gb": 1_000_000}}}
    named = VARIANTS["named"] | no_room
    path = sweep_config(tmp_path, VARIANTS | {"named": named, "seeds": [0, 1]}, evaluate_every=0)
    home = services.home
    pooled = services.run("sweep", str(path), "--work-pool", pool, "--home", str(home), "--json")
    assert pooled.code == 1 and "Traceback" not in pooled.text, pooled.text
    runs = {(run["variant"], run["seed"]): run for run in pooled.result["runs"]}
    rows = {row["variant"]: row for row in pooled.result["variants"]}
    assert rows["no room"]["status"].startswith("2 of 2 failed: not enough disk space")
    computed = Counter(stage for run in runs.values() for stage in run["computed"])
    assert (computed["sft"], computed["rl"]) == (2, 4)  # SFT once a seed
    assert not runs_of_branches(services, UNFINISHED)

    local = prepared(tmp_path / "home")
    done = run_command(
        "sweep", str(path), "--home", str(local), "--json", "--seeds", "1", "--only", "faster"
    )
    assert done.code == 0, done.text
    for run in done.result["runs"]:
        there = runs[run["variant"], run["seed"]]["run_id"]
        assert made(home, there) == made(local, run["run_id"])
    again = services.run(
        *("sweep", str(path), "--work-pool", pool, "--home", str(home), "--json"),
        *("--only", "faster"),
    )
    assert again.code == 0 and again.text.count("finished before") == 4, again.text


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill"])
def test_an_interrupted_sweep_is_cancelled_in_the_pool_and_goes_on(
    services: Services, pool: str, tmp_path: Path, number: signal.Signals
) -> None:
    seed = 40 + number  # other stages than those of the tests before
    path = sweep_config(tmp_path, VARIANTS | {"seeds": [seed]}, steps=40, checkpoint_every=1)
    command = ("sweep", str(path), "--work-pool", pool, "--home", str(services.home))
    process = start_command(*command, "--plain", variables=services.variables)
    wait_for_step(services.home, seed, process)
    os.kill(process.pid, number)
    code = process.wait(timeout=120)
    if number == signal.SIGINT:
        assert code == 130
        assert not runs_of_branches(services, UNFINISHED)
        assert runs_of_branches(services, ["CANCELLED"])
    again = services.run(*command, "--json", timeout=400)
    assert again.code == 0, again.text
    assert not runs_of_branches(services, UNFINISHED)
    resumed = "tags.`posttrain.resumed_step` != '0'"
    mlflow, runs = MlflowClient(services.mlflow_uri), again.result["runs"]
    experiment = mlflow.get_run(runs[0]["run_id"]).info.experiment_id
    cut = mlflow.search_runs([experiment], resumed)
    of = {run.data.tags.get("mlflow.parentRunId") for run in cut}
    assert of & {run["run_id"] for run in runs}, "what was cut went on from its checkpoint"


@pytest.mark.slow
def test_a_variant_that_is_stopped_early_is_cancelled_in_the_pool(
    services: Services, pool: str, tmp_path: Path
) -> None:
    path = sweep_config(tmp_path, VARIANTS | {"seeds": [50]}, steps=200)
    config = yaml.safe_load(path.read_text()) | {"name": "stopped"}
    config["variants"]["named"]["grpo"] = {"set": {"stages.rl.steps": 1}}
    write_config(path, config)
    done = subprocess.run(
        [sys.executable, "-m", stopped_sweep.__name__, str(path), str(services.home), pool],
        env=environment() | services.variables,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    record = SweepRecord.model_validate_json(done.stdout.splitlines()[-1])
    found = {one.variant: one for one in record.branches.values()}
    assert found["grpo"].status == "finished"
    faster = found["faster"]
    assert (faster.status, faster.reason) == ("stopped", "stopped at step 1")
    assert 1 <= faster.step < 200
    cancelled = runs_of_branches(services, ["CANCELLED"])
    assert "faster, seed 50" in {run["name"] for run in cancelled}
    assert not runs_of_branches(services, UNFINISHED)


def wait_for_step(home: Path, seed: int, process: subprocess.Popen[str]) -> None:
    """Until a branch of this seed has been evaluated at its second step of RL."""
    end = time.monotonic() + 240
    while time.monotonic() < end:
        found = record_of(home).branches.values() if (home / "sweeps/tiny").exists() else ()
        if any(one.seed == seed and 2 in one.right for one in found):
            return
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        time.sleep(0.2)
    raise AssertionError("it never came")


@pytest.mark.slow
def test_a_pool_that_there_is_not_is_a_sentence(services: Services, tmp_path: Path) -> None:
    path = sweep_config(tmp_path, VARIANTS)
    unknown = services.run("sweep", str(path), "--work-pool", "nowhere", "--home", str(tmp_path))
    assert unknown.code == 4 and "no work pool 'nowhere' on the server" in unknown.text
    assert "Traceback" not in unknown.text
