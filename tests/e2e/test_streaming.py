"""`schedule: streaming`: samples without an end, weights that change on the way, and the record."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.games import game, game_model, game_run, metrics_of
from tests.helpers.killer import WHERE, install
from tests.helpers.pipeline import prepared, run_command, write_config

pytestmark = pytest.mark.usefixtures("shared_prefect")
STREAMING = {"schedule": "streaming", "max_staleness": 2, "stretch_tokens": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return game_model(tmp_path_factory.mktemp("stream") / "model")


def streaming(model: Path, steps: int, *, in_game: bool, **rl: Any) -> dict[str, Any]:
    """A run of one stage that streams, in the game or on digits."""
    placed = {"environment": game("DigitGame", max_turns=4)} if in_game else {}
    length = {"max_response_length": 24}
    made = game_run(model, steps=steps, generation=length, **STREAMING | placed | rl)
    if not in_game:
        made["task"] = {"name": "digits", "places": 2, "repeats": 6}
        made["stages"]["rl"]["rewards"] = ["accuracy"]
    return made


@pytest.mark.parametrize(
    "in_game",
    [pytest.param(False, id="one turn"), pytest.param(True, id="game")],
)
@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_and_replays_bit_for_bit(
    model: Path, tmp_path: Path, in_game: bool
) -> None:
    made = streaming(model, 7, in_game=in_game, evaluate_every=3, checkpoint_every=2)
    assert equal_steps(made, 7, ["rl:2", "rl:5"], tmp_path) == list(range(1, 8))


@pytest.mark.slow
def test_two_hundred_steps_with_twenty_kills_replay_bit_for_bit(
    model: Path, tmp_path: Path
) -> None:
    """Kills at any moment of a step: while samples are taken, kept, learned from or written."""
    draw = random.Random(0)
    kills = [f"rl:{9 * n}:{draw.random():.3f}" for n in range(1, 21)]
    made = streaming(model, 200, in_game=True, evaluate_every=50, checkpoint_every=7)
    assert equal_steps(made, 200, kills, tmp_path) == list(range(1, 201))


def equal_steps(made: dict[str, Any], steps: int, kills: list[str], folder: Path) -> list[int]:
    """Run `made` with a kill at each of `kills`; the steps in which its replay differs nowhere."""
    config, home = write_config(folder / "run.yaml", made), prepared(folder / "home")
    where = ("run", str(config), "--home", str(home), "--json")
    path = install(folder / "killer")
    for killed_at in kills:
        killed = run_command(*where, variables={"PYTHONPATH": path, WHERE: killed_at})
        assert killed.code == -9, killed.text
    done = run_command(*where)
    assert done.code == 0, done.text
    assert done.result["stages"]["rl"]["status"] == "resumed"
    oldest = max(metrics.get("staleness/max", 0.0) for metrics in metrics_of(home).values())
    assert 1 <= oldest <= 2, "older than the policy, and never older than max_staleness"
    run = str(done.result["run_id"])
    again = run_command("replay", run, "--step", str(steps), "--home", str(home), "--json")
    assert again.code == 0, again.text
    return [each["step"] for each in again.result["steps"] if not each["differences"]]


def test_a_response_goes_on_under_newer_weights_with_a_version_for_each_token(
    model: Path, tmp_path: Path
) -> None:
    """Stretches of one token: whatever is being sampled when weights change goes on under them."""
    config = write_config(
        tmp_path / "run.yaml", streaming(model, 6, in_game=False, stretch_tokens=1)
    )
    home = prepared(tmp_path / "home")
    done = run_command("run", str(config), "--home", str(home), "--json")
    assert done.code == 0, done.text
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
    model: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    made = streaming(model, 2, in_game=False, **changes)
    config = write_config(tmp_path / "run.yaml", made)
    done = run_command("validate", str(config), "--home", str(tmp_path / "unused"))
    assert done.code == 2 and "Traceback" not in done.text
    assert words in " ".join(done.text.split()), done.text
