"""`posttrain sweep` by the real command: shared stages, failures, interruptions, early stops."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow import MlflowClient

from posttrain.core.kit.tiny import make_tiny_model
from posttrain.pipelines.sweep.record import SweepRecord, read_record, sweep_folder
from tests.helpers.pipeline import (
    Finished,
    prepared,
    run_command,
    start_command,
    tiny_config,
    write_config,
)

pytestmark = pytest.mark.usefixtures("shared_prefect")
LEARNING_RATE = "stages.rl.optimizer.learning_rate"
VARIANTS: dict[str, Any] = {
    "seeds": [0, 1],
    "target": 0.0,
    "named": {"grpo": {}, "faster": {"set": {LEARNING_RATE: 2.0e-3}}},
}


def sweep_config(folder: Path, variants: dict[str, Any], **rl: Any) -> Path:
    """A config whose variants share their SFT."""
    config = tiny_config(make_tiny_model(folder / "model"))
    stages = config["stages"]
    stages["rl"] |= {"inputs": {"model": "sft"}, "rewards": ["accuracy"], "steps": 2}
    stages["rl"] |= {"checkpoint_every": 0, "evaluate_every": 1, "micro_batch_size": 8, **rl}
    stages["evaluate"]["inputs"] = {"model": "rl"}
    config["stages"] = {name: stages[name] for name in ("sft", "rl", "evaluate")}
    return write_config(folder / "sweep.yaml", config | {"variants": variants})


def record_of(home: Path) -> SweepRecord:
    return read_record(sweep_folder(home, "tiny"))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """Two variants with two seeds, and a third that fails, in two processes."""
    folder = tmp_path_factory.mktemp("sweep")
    # Only the run itself looks at the disk, so nothing refuses this variant beforehand.
    no_room = {"no room": {"set": {"limits.min_free_gb": 1_000_000}}}
    variants = VARIANTS | {"named": VARIANTS["named"] | no_room}
    path = sweep_config(folder, variants)
    home = prepared(folder / "home")
    options = ("--home", str(home), "--parallel", "2", "--json")
    return home, run_command("sweep", str(path), *options)


def test_a_shared_stage_runs_once_and_a_failure_does_not_end_the_others(
    done: tuple[Path, Finished],
) -> None:
    _, finished = done
    assert finished.code == 1, finished.text
    result = finished.result
    assert "Traceback" not in finished.text
    assert (result["status"], result["failed"]) == ("failed", 2)
    computed = Counter(stage for run in result["runs"] for stage in run["computed"])
    assert computed["sft"] == 2  # once a seed
    assert computed["rl"] == 4
    reused = [run["reused"] for run in result["runs"] if run["variant"] == "faster"]
    assert all("sft" in stages for stages in reused)
    rows = {row["variant"]: row for row in result["variants"]}
    assert rows["grpo"]["effect"] is None
    assert rows["faster"]["effect"]["how"].endswith("and 2 seeds")
    assert rows["faster"]["seeds"] == 2
    assert rows["faster"]["steps_to_target"] == 0
    assert rows["no room"]["status"].startswith("2 of 2 failed: not enough disk space")
    assert result["seconds"]["computed"] == pytest.approx(
        sum(sum(run["computed"].values()) for run in result["runs"])
    )


def test_a_variants_run_is_a_run_like_any_other(done: tuple[Path, Finished]) -> None:
    home, finished = done
    run = next(r for r in finished.result["runs"] if r["variant"] == "faster")
    folder = home / "runs" / run["run_id"]
    assert "variants: null" in (folder / "config.yaml").read_text()
    again = run_command("run", str(folder / "config.yaml"), "--home", str(home), "--json")
    assert again.code == 0, again.text
    assert {s["status"] for s in again.result["stages"].values()} == {"cached"}


def test_mlflow_has_a_run_of_the_sweep_with_its_page_and_children(
    done: tuple[Path, Finished],
) -> None:
    home, finished = done
    client = MlflowClient(f"sqlite:///{home}/mlflow/mlflow.db")
    parent = client.get_run(finished.result["mlflow_run_id"])
    assert parent.info.status == "FAILED"
    names = [item.path for item in client.list_artifacts(parent.info.run_id)]
    assert Path(finished.result["page"]).name in names
    runs = client.search_runs([parent.info.experiment_id], max_results=200)
    children = {
        run.info.run_id
        for run in runs
        if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id
    }
    assert children == {run["run_id"] for run in finished.result["runs"]} - {""}
    page = Path(finished.result["page"]).read_text()
    assert "faster" in page and "data:image/png" in page


def test_what_is_done_is_not_run_again_and_what_failed_is(done: tuple[Path, Finished]) -> None:
    home, finished = done
    path = home.parent / "sweep.yaml"
    before = {r["run_id"] for r in finished.result["runs"] if r["status"] == "finished"}
    options = ("--home", str(home), "--only", "faster", "--json")
    again = run_command("sweep", str(path), *options)
    assert again.code == 0, again.text
    assert {run["run_id"] for run in again.result["runs"]} == before
    assert again.text.count("finished before") == 4


# --- interruptions ---------------------------------------------------------------------------


def wait_until(what: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 240
    while time.monotonic() < end:
        if what():
            return
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        time.sleep(0.05)
    raise AssertionError("it never came")


def begun(home: Path) -> Callable[[], bool]:
    """Whether the first branch is done and the second has taken three steps of RL."""

    def look() -> bool:
        try:
            found = list(record_of(home).branches.values())
        except OSError:
            return False
        return len(found) > 1 and found[0].status == "finished" and 3 in found[1].right

    return look


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["kill", "ctrl-c"])
def test_an_interrupted_sweep_leaves_nothing_running_and_goes_on(
    number: signal.Signals, tmp_path: Path
) -> None:
    path = sweep_config(tmp_path, VARIANTS | {"seeds": [0]}, steps=8, checkpoint_every=1)
    home = prepared(tmp_path / "home")
    process = start_command("sweep", str(path), "--home", str(home), "--plain")
    wait_until(begun(home), process)
    children = family(process)
    assert children
    os.kill(process.pid, number)
    code = process.wait(timeout=90)
    assert code == (-9 if number == signal.SIGKILL else 130)
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    if number == signal.SIGINT:
        assert process.stdout is not None
        assert "the same command goes on where it was" in process.stdout.read()
    first = next(iter(record_of(home).branches.values()))
    again = run_command("sweep", str(path), "--home", str(home), "--json")
    assert again.code == 0, again.text
    assert again.result["runs"][0]["run_id"] == first.run_id
    assert "grpo, seed 0: finished before" in again.text
    stages = [
        json.loads(manifest.read_text())["stage"]
        for manifest in (home / "artifacts").glob("*/manifest.json")
    ]
    assert (stages.count("sft"), stages.count("rl")) == (1, 2)
    cut = MlflowClient(f"sqlite:///{home}/mlflow/mlflow.db").search_runs(
        ["1"], "tags.`posttrain.resumed_step` != '0'"
    )
    assert cut  # the stage that was cut went on from its checkpoint
