"""Stages that learn from answers of the data or of a teacher, and from a teacher's record."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from posttrain.core.kit.tiny import make_tiny_model
from posttrain.pipelines.cli.main import app
from tests.helpers.distilling import STEP, TEACHER
from tests.helpers.killer import WHERE, install
from tests.helpers.learning import SEEDS, final, make_model, run, run_config
from tests.helpers.pipeline import (
    Finished,
    prepared,
    run_command,
    start_command,
    tiny_config,
    write_config,
)
from tests.helpers.scoring_server import scoring_server

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


def rows_of(folder: Path) -> dict[tuple[int, ...], tuple[torch.Tensor, ...]]:
    """Of each prompt and answer: what the teacher says of its tokens. Stages draw other orders."""
    (path,) = folder.glob("rows-*.safetensors")
    made = load_file(path)
    prompts = made["prompt_ids"].split(made["prompt_lengths"].tolist())
    lengths = made["response_lengths"].tolist()
    names = ("response_ids", "teacher_logprobs", "teacher_topk_ids", "teacher_topk_logprobs")
    columns = [made[name].split(lengths) for name in names]
    return {
        tuple(prompts[row].tolist()): said for row, said in enumerate(zip(*columns, strict=True))
    }


def test_a_teacher_behind_a_server_is_recorded_as_its_weights_are(tmp_path: Path) -> None:
    """The run's own model, as it is here and behind a server: two records that say the same."""
    model = make_tiny_model(tmp_path / "model", seed=1, init_std=0.3)
    config = tiny_config(model)
    record = {
        "kind": "record_teacher",
        "inputs": {"model": "base"},
        "num_problems": 100,
        "top_k": 8,
        "generation": {"max_response_length": 6},
    }
    student = {
        "kind": "distill",
        "inputs": {"model": "base", "recorded": "there"},
        "distillation": {"name": "gkd", "top_k": 8},
        "steps": 2,
        "prompts_per_step": 4,
        "generation": {"max_response_length": 6},
        "evaluate_every": 0,
    }
    with scoring_server(model) as server:
        served = record | {"teacher": {"base_url": server.url, "model": "big"}}
        config["stages"] = {
            "here": record,
            "there": served,
            "sampled": served | {"answers": "sampled", "num_generations": 2},
            "student": student,
        }
        path, home = write_config(tmp_path / "run.yaml", config), prepared(tmp_path / "home")
        assert run_command("validate", str(path)).code == 0
        done = run_command("run", str(path), "--home", str(home), "--json")
    assert done.code == 0, done.text
    made = {n: Path(s["artifacts"][0]["uri"]) for n, s in done.result["stages"].items()}
    found = {name: rows_of(made[name]) for name in ("here", "there", "sampled")}
    assert found["there"].keys() == found["here"].keys()
    for key, wanted in found["here"].items():
        for ours, theirs in zip(found["there"][key], wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)
    assert done.result["stages"]["sampled"]["metrics"]["record/rows"] == 2 * len(found["here"])
    index = json.loads((made["there"] / "index.json").read_text())
    assert index["teacher"] == f"big at {server.url}"
    # The student is its own teacher, so there is nothing to learn.
    assert abs(done.result["stages"]["student"]["metrics"]["loss/distillation"]) < 1e-5


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"teacher": {"model": "big"}}, "set teacher.base_url and teacher.model"),
        (
            {
                "teacher": {"base_url": "http://127.0.0.1:9/v1", "model": "big"},
                "generation": {"max_response_length": 2, "temperature": 0.7},
            },
            "set generation.temperature: 1.0",
        ),
        (
            {"teacher": {"base_url": "http://127.0.0.1:9/v1", "model": "big", "routes": ["a"]}},
            "remove teacher.routes",
        ),
    ],
)
def test_a_recorded_server_that_cannot_be_is_refused(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    config = tiny_config(make_tiny_model(tmp_path / "model"))
    config["stages"] = {"rec": {"kind": "record_teacher", "inputs": {"model": "base"}, **change}}
    loaded = CliRunner().invoke(app, ["validate", str(write_config(tmp_path / "run.yaml", config))])
    assert loaded.exit_code == 2
    assert says in loaded.output and loaded.output.count("error: ") == 1


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
