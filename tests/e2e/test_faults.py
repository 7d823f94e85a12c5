"""What goes wrong around a run: a full disk, servers that go away, a clock that jumps.

Each is survived, or refused in one sentence; then the same command ends where it would have.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from posttrain.core.kit.tiny import make_tiny_model
from tests.helpers.pipeline import (
    Finished,
    prepared,
    run_command,
    run_loaded,
    start_command,
    tiny_config,
    wait_for_step,
    write_config,
)
from tests.helpers.plugin_site import offer


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    made = tiny_config(make_tiny_model(folder / "model"))
    made["stages"]["rl"]["steps"] = 8
    made["limits"]["min_free_gb"] = 0
    return write_config(folder / "run.yaml", made)


@pytest.fixture(scope="module")
def whole(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The run that nothing happens to."""
    home = prepared(tmp_path_factory.mktemp("whole") / "home")
    done = run_command("run", str(config), "--home", str(home), "--json")
    assert done.code == 0, done.text
    return done


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 MB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("a small disk can be mounted by root only, and not in every container")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def models(run: Finished) -> dict[str, str]:
    """Digest of every model that a run made."""
    made = {name: stage["artifacts"][0] for name, stage in run.result["stages"].items()}
    return {name: item["digest"] for name, item in made.items() if "model" in item["kind"]}


def fill(folder: Path) -> Path:
    """Leave no byte on the disk of `folder`."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as stream:  # what a buffer kept would be written at the end
        try:
            while True:
                stream.write(bytes(2**16))
                stream.flush()
        except OSError:
            return path


@pytest.mark.slow
def test_a_run_goes_on_without_what_prefect_would_only_show(
    config: Path, whole: Finished, tmp_path: Path
) -> None:
    home = prepared(tmp_path / "home")
    with sqlite3.connect(home / "prefect" / "prefect.db") as database:
        database.execute(
            "CREATE TRIGGER full BEFORE INSERT ON artifact BEGIN SELECT RAISE(ABORT, 'full'); END"
        )
    database.close()
    done = run_command("run", str(config), "--home", str(home), "--json")
    assert done.code == 0, done.text
    assert models(done) == models(whole)
    for lacking in ("the bar of stage 'sft'", "samples of stage 'evaluate'", "the run's results"):
        assert done.text.count(f"Prefect's pages lack {lacking}") == 1, done.text


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_full_disk_stops_a_run_and_what_it_left_is_gone_on_from(
    config: Path, whole: Finished, small_disk: Path
) -> None:
    home = prepared(small_disk / "home")
    process = start_command("run", str(config), "--home", str(home), "--plain")
    wait_for_step(home, 2, process)
    filler = fill(small_disk)
    text, _ = process.communicate(timeout=240)
    assert process.returncode in (1, 3, 4), text
    assert "Traceback" not in text
    last = text.strip().splitlines()[-1]
    assert last.startswith("error: ") and ("space" in last or "room" in last or "full" in last)
    filler.unlink()
    again = run_command("run", str(config), "--home", str(home), "--json", timeout=240)
    assert again.code == 0, again.text
    assert models(again) == models(whole)
    assert again.result["stages"]["sft"]["status"] == "cached"


@pytest.mark.parametrize("place", ["file/home", "/proc/home"])
def test_a_home_that_cannot_be_made_is_refused_in_one_sentence(
    config: Path, tmp_path: Path, place: str
) -> None:
    (tmp_path / "file").write_text("")
    home = tmp_path / place
    done = run_loaded("run", str(config), "--home", str(home))
    assert done.code == 4, done.text
    last = done.text.strip().splitlines()[-1]
    assert last.startswith(f"error: cannot make the folder {home}") and "--home" in last
    assert "Traceback" not in done.text


JUMPS = '''
import time
from posttrain.core.hooks import hookimpl

REAL, HOUR = time.time_ns, 3600 * 10**9

@hookimpl
def posttrain_on_step_end(stage, step, metrics):
    """An hour back after the second step of RL, a day ahead after the fourth."""
    moved = {2: -HOUR, 4: 24 * HOUR}.get(step, None) if stage == "rl" else None
    if moved is not None:
        time.time_ns = lambda: REAL() + moved
        time.time = lambda: (REAL() + moved) / 1e9
'''


@pytest.mark.slow
def test_a_clock_that_jumps_changes_neither_weights_nor_the_order_of_steps(
    config: Path, whole: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python sees it: a plugin that an entry point offers moves it."""
    offer(tmp_path, "jumps", JUMPS, monkeypatch)
    home = prepared(tmp_path / "home")
    done = run_command("run", str(config), "--home", str(home), "--json")
    assert done.code == 0, done.text
    assert models(done) == models(whole)
    stage = done.result["stages"]["rl"]["mlflow_run_id"]
    points = MlflowClient(done.result["mlflow_uri"]).get_metric_history(stage, "reward/mean")
    assert [point.step for point in sorted(points, key=lambda point: point.step)] == [*range(1, 9)]
    times = {point.step: point.timestamp for point in points}
    assert times[3] < times[2] - 3_000_000 and times[5] > times[2] + 80_000_000, "it did jump"


LOSES = """
from pathlib import Path
from posttrain.core.hooks import hookimpl

def lose(name):
    mark = Path("FOLDER") / name
    if not mark.exists():
        mark.touch()
        raise ConnectionResetError("the listener's server went away")

@hookimpl
def posttrain_on_step_end(stage, step, metrics):
    if stage == "sft":
        lose(stage)

@hookimpl
def posttrain_on_stage_end(stage, status, metrics):
    if stage == "evaluate" and status == "ran":
        lose(stage)
"""


@pytest.mark.slow  # minutes of waiting for a server
def test_a_lost_connection_repeats_an_evaluation_and_never_a_step_of_training(
    config: Path, whole: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(tmp_path, "loses", LOSES.replace("FOLDER", str(tmp_path)), monkeypatch)
    home = prepared(tmp_path / "home")
    first = run_command("run", str(config), "--home", str(home), "--json")
    assert first.code == 1 and "the listener's server went away" in first.text
    done = run_command("run", str(config), "--home", str(home), "--json")
    assert done.code == 0, done.text
    assert models(done) == models(whole)
    assert (tmp_path / "evaluate").exists()
    assert done.result["stages"]["evaluate"]["status"] == "cached", "tried again, it was there"
    client = MlflowClient(done.result["mlflow_uri"])
    runs = client.search_runs([done.result["mlflow_experiment_id"]])
    reported = [(run.info.run_name, run.info.status) for run in runs]
    assert reported.count(("sft", "FAILED")) == 1 and reported.count(("sft", "FINISHED")) == 1
