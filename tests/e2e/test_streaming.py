"""`schedule: streaming`: samples without an end, weights that change on the way, and the record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.core.kit.tiny import make_tiny_model, make_tiny_tokenizer
from tests.helpers import live
from tests.helpers.killer import WHERE, install
from tests.helpers.pipeline import Finished, journal_lines, prepared, run_command, write_config

pytestmark = pytest.mark.usefixtures("shared_prefect")
GAME = {"name": "game.py:DigitGame", "max_turns": 4}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stream")
    (folder / "game.py").write_text(Path(live.__file__).read_text())
    tokenizer = make_tiny_tokenizer(live.CHARACTERS, live.TEMPLATE)
    make_tiny_model(folder / "model", seed=1, init_std=0.02, tokenizer=tokenizer)
    return folder


def streaming(project: Path, steps: int, environment: bool, **rl: Any) -> dict[str, Any]:
    """A run of one stage that streams, in the game or on digits."""
    digits = {"name": "digits", "places": 2, "repeats": 6}
    game = {**GAME, "name": f"{project / 'game.py'}:DigitGame"}
    return {
        "name": "stream",
        "engine": "transformers",
        "model": {"source": str(project / "model"), "dtype": "float32", "max_model_len": 64},
        "task": {"name": "episodes", "prompt": "3"} if environment else digits,
        "evaluation": {"num_problems": 8, "max_response_length": 32, "num_samples": 0},
        "limits": {"num_threads": 1},
        "stages": {
            "rl": {
                "kind": "rl",
                "inputs": {"model": "base"},
                "algorithm": "grpo",
                "steps": steps,
                "prompts_per_step": 4,
                "num_generations": 4,
                "micro_batch_size": 16,
                "schedule": "streaming",
                "max_staleness": 2,
                "stretch_tokens": 4,
                "generation": {"max_response_length": 24},
                "rewards": ["environment" if environment else "accuracy"],
                "evaluate_every": 3,
                "checkpoint_every": 2,
                "optimizer": {"learning_rate": 1.0e-3},
                **({"environment": game} if environment else {}),
                **rl,
            },
        },
    }


def metrics_of(home: Path) -> dict[int, dict[str, float]]:
    return {each["step"]: each["metrics"] for each in map(json.loads, journal_lines(home, "rl"))}


def replayed(home: Path, done: Finished, step: int) -> Finished:
    run = str(done.result["run_id"])
    return run_command("replay", run, "--step", str(step), "--home", str(home), "--json")


@pytest.mark.parametrize(
    "environment",
    [pytest.param(False, id="one turn", marks=pytest.mark.slow), pytest.param(True, id="game")],
)
def test_a_run_that_is_killed_goes_on_and_replays_bit_for_bit(
    project: Path, tmp_path: Path, environment: bool
) -> None:
    steps = 7
    config = write_config(tmp_path / "run.yaml", streaming(project, steps, environment))
    home = prepared(tmp_path / "home")
    where = ("run", str(config), "--home", str(home), "--json")
    path = install(tmp_path / "killer")
    for killed_at in (2, 5):
        killed = run_command(*where, variables={"PYTHONPATH": path, WHERE: f"rl:{killed_at}"})
        assert killed.code == -9, killed.text
    done = run_command(*where)
    assert done.code == 0, done.text
    assert done.result["stages"]["rl"]["status"] == "resumed"
    found = metrics_of(home)
    oldest = max(metrics.get("staleness/max", 0.0) for metrics in found.values())
    assert 1 <= oldest <= 2, "older than the policy, and never older than max_staleness"
    again = replayed(home, done, steps)
    assert again.code == 0, again.text
    compared = again.result["steps"]
    assert [each["step"] for each in compared] == list(range(1, steps + 1))
    assert not any(each["differences"] for each in compared), again.text


def test_a_response_goes_on_under_newer_weights_with_a_version_for_each_token(
    project: Path, tmp_path: Path
) -> None:
    """Stretches of one token: whatever is being sampled when weights change goes on under them."""
    made = streaming(project, 6, False, stretch_tokens=1, evaluate_every=0)
    config = write_config(tmp_path / "run.yaml", made)
    home = prepared(tmp_path / "home")
    done = run_command("run", str(config), "--home", str(home), "--json")
    assert done.code == 0, done.text
    import gzip

    logs = sorted((home / "artifacts").glob("rl-*/episodes/step-*.json.gz"))
    assert len(logs) == 6
    mixed = 0
    for log in logs:
        for group in json.loads(gzip.decompress(log.read_bytes()))["groups"]:
            for completion in group["completions"]:
                versions = completion["versions"]
                assert len(versions) in (0, len(completion["token_ids"]))
                assert versions == sorted(versions), "weights only become newer"
                mixed += len(set(versions)) > 1
    assert mixed, "no response saw two policies"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_staleness": 0}, "set max_staleness: 1 or more"),
        ({"sampler": "dynamic"}, "chooses them itself; set sampler: group"),
        ({"schedule": "steps"}, "stretch_tokens would change nothing"),
    ],
)
def test_what_does_not_stream_is_one_sentence(
    project: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    config = write_config(tmp_path / "run.yaml", streaming(project, 2, False, **changes))
    done = run_command("validate", str(config), "--home", str(tmp_path / "unused"))
    assert done.code == 2 and "Traceback" not in done.text
    assert words in " ".join(done.text.split()), done.text
