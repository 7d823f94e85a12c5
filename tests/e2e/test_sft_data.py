"""SFT on files of chats: epochs, held-out loss, early stopping, the best model, kill and resume."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from posttrain.core.kit.tiny import make_tiny_model
from tests.helpers.pipeline import (
    Finished,
    journal_lines,
    prepared,
    run_command,
    start_command,
    tiny_config,
    write_config,
)

pytestmark = pytest.mark.usefixtures("shared_prefect")

MEASURED = ("time/", "memory/", "throughput/")


def chats(path: Path, first: int, count: int) -> Path:
    """Chats of two turns with sums; every fifth has an answer that is not to be learned."""
    with path.open("w") as stream:
        for number in range(first, first + count):
            a, b = number % 10, number // 10
            turns = [
                {"role": "user", "content": f"{a}+{b}"},
                {"role": "assistant", "content": str(a + b), "train": number % 5 > 0},
                {"role": "user", "content": f"{b}+{a}"},
                {"role": "assistant", "content": str(a + b)},
            ]
            stream.write(json.dumps({"messages": turns}) + "\n")
    return path


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats")
    made = tiny_config(make_tiny_model(folder / "model"))
    alpaca = folder / "alpaca.jsonl"
    rows = [{"instruction": "Say", "input": c, "output": c} for c in "abcdefgh"]
    rows.append({"instruction": "Say", "input": "nothing", "output": ""})
    alpaca.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [
        {"path": str(chats(folder / "chats.jsonl", 0, 40)), "weight": 3},
        {"path": str(alpaca), "weight": 1},
    ]
    stage = {
        "kind": "sft",
        "inputs": {"model": "base"},
        "data": sources,
        "held_out": str(chats(folder / "unseen.jsonl", 40, 10)),
        "epochs": 20,
        "max_tokens_per_batch": 600,
        "evaluate_every": 3,
        # The rate is far too high, so that the held-out loss soon rises.
        "optimizer": {"learning_rate": 0.03},
        "early_stopping": {"patience": 2},
        "keep_best": True,
        "checkpoint_every": 1,
        "micro_batch_size": 4,
    }
    made["stages"] = {"sft": stage}
    del made["task"]
    return write_config(folder / "run.yaml", made)


@pytest.fixture(scope="module")
def whole(config: Path) -> Finished:
    home = prepared(config.parent / "whole")
    done = run_command("run", str(config), "--home", str(home), "--json")
    assert done.code == 0, done.text
    return done


def metrics(run: Finished) -> dict[str, list[tuple[int, float]]]:
    """Every metric that is not a measurement, in order of steps."""
    client, run_id = MlflowClient(run.result["mlflow_uri"]), stage_of(run)["mlflow_run_id"]
    found = {}
    for name in client.get_run(run_id).data.metrics:
        if not name.startswith(MEASURED):
            points = client.get_metric_history(run_id, name)
            found[name] = sorted((point.step, point.value) for point in points)
    return found


def stage_of(run: Finished) -> dict[str, Any]:
    stage: dict[str, Any] = run.result["stages"]["sft"]
    return stage


def test_the_stage_reads_measures_and_stops(whole: Finished) -> None:
    found, last = metrics(whole), stage_of(whole)["metrics"]
    measured = dict(found["sft/held_out_loss"])
    steps = [step for step, _ in found["sft/loss"]]
    assert "rows of the format messages" in whole.text and "format alpaca" in whole.text
    assert "1 of 9 rows" in whole.text, "the row without an answer is reported"
    assert dict(found["data/num_rows"])[0] == 48 and dict(found["data/num_held_out_rows"])[0] == 10
    assert dict(found["data/nothing_to_learn"])[0] == 1
    # It stopped long before 20 passes, two evaluations after the best one.
    best = int(last["sft/best_step"])
    assert last["sft/stopped_early"] == 1 and steps[-1] == best + 6 < 20 * 8
    assert {step for step in measured if step} >= {3, best, best + 3}
    losses = {step: value for step, value in measured.items() if step in range(3, best + 4, 3)}
    assert min(losses, key=lambda step: losses[step]) == best
    assert last["sft/held_out_loss"] == losses[best] < measured[0], "of the model that is kept"
    assert max(value for _, value in found["tokens/total"]) <= 600


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_model(
    config: Path, whole: Finished, tmp_path: Path
) -> None:
    home = prepared(tmp_path / "home")
    best = int(stage_of(whole)["metrics"]["sft/best_step"])
    for after in (2, best + 1):
        process = start_command("run", str(config), "--home", str(home), "--plain")
        while process.poll() is None and len(journal_lines(home, "sft")) < after:
            time.sleep(0.02)  # a step takes longer
        process.kill()
        process.wait()
    done = run_command("run", str(config), "--home", str(home), "--json")
    assert done.code == 0, done.text
    assert stage_of(done)["status"] == "resumed"
    digest = [artifact["digest"] for artifact in stage_of(done)["artifacts"]]
    assert digest == [artifact["digest"] for artifact in stage_of(whole)["artifacts"]]
    assert metrics(done) == metrics(whole)
    assert not list((home / "checkpoints").rglob("*")), "no tokens or models are left"


@pytest.mark.slow
def test_data_and_their_settings_decide_what_is_computed_again(
    config: Path, whole: Finished
) -> None:
    home = config.parent / "whole"
    again = run_command("plan", str(config), "--home", str(home), "--json")
    assert again.code == 0, again.text
    assert again.result["stages"][0]["cached"], again.text
    chats(config.parent / "chats.jsonl", 0, 39)
    changed = run_command("plan", str(config), "--home", str(home), "--why", "--json")
    assert not changed.result["stages"][0]["cached"]
    assert "the content of stages.sft.data.0.path changed" in changed.text


def test_wrong_files_are_named_before_anything_runs(config: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "mixed.jsonl"
    wrong.write_text('{"text": "a"}\n{"prompt": "a", "completion": "b"}\n')
    found = run_command("validate", str(config), "--set", f"stages.sft.data={wrong}")
    assert found.code == 3, found.text
    assert f"{wrong}:1 is of the format text" in found.text and f"{wrong}:2" in found.text
    assert "Traceback" not in found.text


@pytest.mark.slow
def test_worked_answers_of_a_task_are_held_out_and_weighted_as_well(tmp_path: Path) -> None:
    made = tiny_config(make_tiny_model(tmp_path / "model"))
    stage = {**made["stages"]["sft"], "epochs": 2, "batch_size": 16, "weighting": "dft"}
    del stage["steps"]
    made["stages"] = {"sft": {**stage, "held_out_fraction": 0.25, "evaluate_every": 4}}
    config = write_config(tmp_path / "run.yaml", made)
    done = run_command("run", str(config), "--home", str(prepared(tmp_path / "home")), "--json")
    assert done.code == 0, done.text
    found = metrics(done)
    trained, unseen = (int(found[f"data/num_{name}"][0][1]) for name in ("rows", "held_out_rows"))
    assert unseen == round(0.25 * (trained + unseen)) > 0
    steps = [step for step, _ in found["sft/loss"]]
    assert steps == list(range(1, 2 * -(-trained // 16) + 1))
    nll, weighted = dict(found["sft/nll"]), dict(found["sft/loss"])
    assert all(0 < weighted[step] < nll[step] for step in steps)
    measured = dict(found["sft/held_out_loss"])
    assert set(measured) == {0, *steps[3::4], steps[-1]}
    assert measured[steps[-1]] < measured[0]
