"""Stages that learn from answers of the data or of a teacher, and from a teacher's record."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.distilling import STEP, TEACHER
from tests.helpers.killer import WHERE, install
from tests.helpers.learning import SEEDS, final, make_model, run, run_config
from tests.helpers.pipeline import Finished, prepared, run_command, start_command, write_config

pytestmark = pytest.mark.usefixtures("shared_prefect")
RECORD = {
    "kind": "record_teacher",
    "inputs": {"model": "big"},
    "top_k": 8,
    "rows_per_file": 1,
    "generation": {"max_response_length": 2},
}
DISTILL = {**STEP, "kind": "distill", "inputs": {"model": "base", "teacher": "big"}}
STUDENTS: dict[str, dict[str, Any]] = {
    "data": {**DISTILL, "on_policy_share": 0.0},
    "half": {**DISTILL, "on_policy_share": 0.5},
    "seq": {**DISTILL, "on_policy_share": 0.5, "seq_kd": True},
    "offline": {
        **DISTILL,
        "inputs": {"model": "base", "recorded": "rec"},
        "distillation": {"name": "gkd", "top_k": 8},
    },
}


def config(folder: Path, seed: int, students: list[str], *, teacher: int, steps: int) -> Any:
    """A teacher, its record, and students from the same random weights."""
    stages: dict[str, Any] = {"big": {**TEACHER, "steps": teacher}, "rec": RECORD}
    stages |= {name: {**STUDENTS[name], "steps": steps} for name in students}
    task = {"places": 1, "repeats": 2, "held_out_permille": 300}
    return run_config(make_model(folder, seed), seed, stages, task, held_out=1)


def digests(run: Finished) -> dict[str, str]:
    """Of what each stage made first."""
    return {n: stage["artifacts"][0]["digest"] for n, stage in run.result["stages"].items()}


@pytest.mark.slow
def test_a_killed_student_goes_on_and_its_steps_replay(tmp_path: Path) -> None:
    made = config(tmp_path, 0, ["half", "offline"], teacher=2, steps=6)
    made["stages"]["half"]["checkpoint_every"] = 2
    path, home = write_config(tmp_path / "run.yaml", made), prepared(tmp_path / "home")
    where = ("run", str(path), "--home", str(home), "--json")
    variables = {"PYTHONPATH": install(tmp_path / "killer"), WHERE: "half:3"}
    killed = run_command(*where, variables=variables)
    assert killed.code == -9, killed.text
    done = run_command(*where)
    assert done.code == 0, done.text
    assert done.result["stages"]["half"]["status"] == "resumed"
    assert done.result["stages"]["rec"]["metrics"]["record/rows"] > 5
    run_id = str(done.result["run_id"])
    again = run_command(
        "replay", run_id, "--stage", "half", "--step", "5", "--home", str(home), "--json"
    )
    assert again.code == 0 and again.result["equal"], again.text


@pytest.mark.slow
def test_killed_at_any_stage_it_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    made = config(tmp_path, 0, list(STUDENTS), teacher=2, steps=6)
    made["task"]["places"] = 2  # more problems, so more files of a record
    for name in STUDENTS:
        made["stages"][name]["checkpoint_every"] = 2
    path, home = write_config(tmp_path / "run.yaml", made), prepared(tmp_path / "home")
    where = ("run", str(path), "--home", str(home), "--json")
    process = start_command(*where)
    while not list(home.glob("checkpoints/rec-*/**/rows-00003.safetensors")):
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    killer = install(tmp_path / "killer")
    for name in STUDENTS:
        killed = run_command(*where, variables={"PYTHONPATH": killer, WHERE: f"{name}:3"})
        assert killed.code == -9, killed.text
        if name == "data":
            assert "files were recorded before" in killed.text
    done = run_command(*where)
    assert done.code == 0, done.text
    whole = run_command("run", str(path), "--home", str(prepared(tmp_path / "whole")), "--json")
    assert whole.code == 0, whole.text
    assert digests(done) == digests(whole)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", SEEDS)
def test_students_reach_their_teacher(tmp_path: Path, seed: int) -> None:
    made = config(tmp_path, seed, list(STUDENTS), teacher=25, steps=40)
    for name in STUDENTS:  # a step on its own answers tells how many are right
        inputs = {"model": name, "teacher": "big"}
        made["stages"][f"then_{name}"] = {**DISTILL, "inputs": inputs, "steps": 1}
    learned = run(tmp_path, made)
    assert final(learned.history("big", "acc/mean")) > 0.9
    reached = {name: learned.history(f"then_{name}", "acc/mean")[0] for name in STUDENTS}
    assert all(value > 0.85 for value in reached.values()), reached
    drawn = learned.history("half", "distil/on_policy")
    assert 0.2 < sum(drawn) / len(drawn) < 0.8
    assert learned.history("offline", "distil/on_policy") == [0.0] * 40
