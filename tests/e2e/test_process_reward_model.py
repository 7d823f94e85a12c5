"""A process reward model as a stage: from own answers or a file, into reinforcement learning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.core.kit.tiny import BARE_TEMPLATE, make_tiny_model, make_tiny_tokenizer
from tests.helpers.killer import WHERE, install
from tests.helpers.pipeline import Finished, prepared, run_command, write_config

pytestmark = pytest.mark.usefixtures("shared_prefect")
RL = {
    "kind": "rl",
    "inputs": {"model": "sft", "process_reward_model": "prm"},
    "algorithm": "grpo_process",
    "rewards": [{"name": "process_reward", "separator": ";"}],
    "steps": 2,
    "prompts_per_step": 4,
    "num_generations": 4,
    "generation": {"max_response_length": 6},
    "evaluate_every": 0,
}


def config(folder: Path, prm: dict[str, Any], **stages: Any) -> dict[str, Any]:
    """The last digit of the prompt is to be said twice, each time as a step that `;` ends."""
    tokenizer = make_tiny_tokenizer("0123456789;", BARE_TEMPLATE)
    model = make_tiny_model(folder / "model", init_std=0.05, tokenizer=tokenizer)
    rows = folder / "rows.jsonl"
    numbers = [f"{n:02d}" for n in range(100)]
    rows.write_text(
        "".join(json.dumps({"prompt": n, "answer": f"{n[1]};{n[1]};"}) + "\n" for n in numbers)
    )
    return {
        "name": "steps",
        "engine": "transformers",
        # Room for a prompt and its answer, and for no more behind a step of it.
        "model": {"source": str(model), "dtype": "float32", "max_model_len": 9},
        "task": {"name": "rows", "path": str(rows), "match": "exact"},
        "evaluation": {"num_problems": 4, "max_response_length": 6},
        "limits": {"num_threads": 1},
        "stages": {
            "sft": {
                "kind": "sft",
                "inputs": {"model": "base"},
                "steps": 20,
                "batch_size": 32,
                "optimizer": {"learning_rate": 5.0e-3},
            },
            "prm": {
                "kind": "process_reward_model",
                "inputs": {"model": "sft"},
                "separator": ";",
                "generation": {"max_response_length": 6},
                "batch_size": 8,
                **prm,
            },
            **stages,
        },
    }


@pytest.mark.slow
def test_own_answers_become_labelled_steps_and_a_reward(tmp_path: Path) -> None:
    prm = {"num_prompts": 12, "num_generations": 4, "num_continuations": 4}
    made = config(tmp_path, {**prm, "checkpoint_every": 1}, rl=RL)
    path, home = write_config(tmp_path / "run.yaml", made), prepared(tmp_path / "home")
    where = ("run", str(path), "--home", str(home), "--json")
    variables = {"PYTHONPATH": install(tmp_path / "killer"), WHERE: "prm:2"}
    killed = run_command(*where, variables=variables)
    assert killed.code == -9, killed.text
    done = run_command(*where)
    assert done.code == 0, done.text
    stages = done.result["stages"]
    assert stages["prm"]["status"] == "resumed"
    metrics = stages["prm"]["metrics"]
    assert metrics["prm/num_steps"] > 10 and metrics["prm/num_held_out_steps"] > 2
    assert 0 <= metrics["prm/held_out_low"] <= metrics["prm/held_out_step_accuracy"]
    assert stages["rl"]["metrics"]["reward/component/process_reward"] > 0
    run = str(done.result["run_id"])
    again = run_command(
        "replay", run, "--stage", "prm", "--step", "3", "--home", str(home), "--json"
    )
    assert again.code == 0 and again.result["equal"], again.text
    # The same run without the kill.
    whole = run_command("run", str(path), "--home", str(prepared(tmp_path / "other")), "--json")
    assert whole.code == 0, whole.text
    assert made_by(whole, "prm") == made_by(done, "prm")


def made_by(run: Finished, stage: str) -> str:
    """The digest of what a stage made."""
    (made,) = run.result["stages"][stage]["artifacts"]
    return str(made["digest"])


def labelled(path: Path) -> str:
    """A step is right where it says the last digit of the prompt."""
    rows = []
    for number in range(100):
        prompt, digits = f"{number:02d}", [str(number % 10), str((3 * number) % 10)]
        labels = [digit == prompt[1] for digit in digits]
        rows.append({"prompt": prompt, "completions": digits, "labels": labels})
        rows.append({"prompt": prompt, "completions": digits[::-1], "labels": labels[::-1]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_learns_which_steps_are_right(tmp_path: Path, seed: int) -> None:
    prm = {
        "data": labelled(tmp_path / "steps.jsonl"),
        "epochs": 60,
        "batch_size": 32,
        "optimizer": {"learning_rate": 3.0e-3},
    }
    made = config(tmp_path, prm)
    path = write_config(tmp_path / "run.yaml", {**made, "seed": seed})
    done = run_command("run", str(path), "--home", str(prepared(tmp_path / "home")), "--json")
    assert done.code == 0, done.text
    metrics = done.result["stages"]["prm"]["metrics"]
    print(f"seed {seed}: {metrics['prm/held_out_step_accuracy']:.2f} of held-out steps")
    assert metrics["prm/held_out_step_accuracy"] > 0.9


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"data": "nowhere.jsonl", "generation": {}},
            "cannot read nowhere.jsonl, which is not there",
        ),
        ({"num_continuations": 0}, "greater than or equal to 1"),
        ({"separator": ""}, "at least 1 character"),
    ],
)
def test_a_wrong_stage_is_one_sentence(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = write_config(tmp_path / "run.yaml", config(tmp_path, change))
    done = run_command("validate", str(path), "--home", str(tmp_path / "unused"))
    assert done.code in (2, 3) and "Traceback" not in done.text
    assert words in " ".join(done.text.split()), done.text
