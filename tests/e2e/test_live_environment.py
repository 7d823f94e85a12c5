"""Training in an environment that answers otherwise each time, and fails now and then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.games import game, game_model, game_run, metrics_of
from tests.helpers.killer import WHERE, install
from tests.helpers.pipeline import prepared, run_command, write_config

pytestmark = pytest.mark.usefixtures("shared_prefect")
STEPS = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return game_model(tmp_path_factory.mktemp("game") / "model")


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param(game("Whims", max_turns=4), id="game", marks=pytest.mark.slow),
        pytest.param(game("Whimsical", max_requests=8), id="program", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_learns_from_the_episodes_that_it_had_and_replays(
    model: Path, tmp_path: Path, environment: dict[str, Any]
) -> None:
    fields = {"steps": STEPS, "evaluate_every": 5, "checkpoint_every": 2}
    made = game_run(model, evaluate=True, environment=environment, **fields)
    config, home = write_config(tmp_path / "run.yaml", made), prepared(tmp_path / "home")
    where = ("run", str(config), "--home", str(home), "--json")
    path = install(tmp_path / "killer")
    killed = run_command(*where, variables={"PYTHONPATH": path, WHERE: "rl:3"})
    assert killed.code == -9, killed.text
    before = metrics_of(home)
    assert 3 in before
    done = run_command(*where)
    assert done.code == 0, done.text
    assert done.result["stages"]["rl"]["status"] == "resumed"
    again = metrics_of(home)
    for name in ("reward/mean", "tokens/response", "tools/turns", "adv/max_abs"):
        assert before[3][name] == again[3][name], f"{name}: other episodes after the kill"
    run = str(done.result["run_id"])
    replayed = run_command("replay", run, "--step", str(STEPS), "--home", str(home), "--json")
    assert replayed.code == 0, replayed.text
    steps = replayed.result["steps"]
    assert [each["step"] for each in steps] == list(range(1, STEPS + 1))
    assert not any(each["differences"] for each in steps), replayed.text
    failed = [line for line in done.text.splitlines() if "episodes failed" in line]
    assert failed, "one in eight episodes breaks, and the log says so"
    if "max_requests" in environment:
        branches = [metrics.get("env/branches", 0.0) for metrics in again.values()]
        assert max(branches) > 1.5, "the helper's question is a branch of its own"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "are judged by an environment, and the stage has none"),
        (
            {"environment": game("DigitGame"), "sampler": "arpo_tree"},
            "holds its states itself; set sampler: group",
        ),
        (
            {"environment": {"name": "tools", "step_s": 5.0}},
            "environment: step_s would change nothing",
        ),
        (
            {"environment": game("Player", max_turns=9)},
            "environment: max_turns would change nothing",
        ),
    ],
)
def test_what_cannot_be_combined_is_one_sentence(
    model: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    config = write_config(tmp_path / "run.yaml", game_run(model, steps=2, **changes))
    done = run_command("validate", str(config), "--home", str(tmp_path / "unused"))
    assert done.code == 2 and "Traceback" not in done.text
    assert words in " ".join(done.text.split())
