"""Forks of stages that stream: samples that cannot be drawn again, before the fork and after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.games import game, game_model, game_run
from tests.helpers.pipeline import Finished, prepared, run_command, write_config

pytestmark = [pytest.mark.usefixtures("shared_prefect"), pytest.mark.slow]
STREAMING = {"schedule": "streaming", "max_staleness": 2, "stretch_tokens": 4}
WHOLE = ("stages.rl.schedule=steps", "stages.rl.stretch_tokens=null")


def digest(run: Finished) -> str:
    return str(run.result["stages"]["rl"]["artifacts"][0]["digest"])


@pytest.mark.parametrize("in_game", [False, True], ids=["one turn", "game"])
def test_an_unchanged_fork_takes_the_samples_of_its_parent(tmp_path: Path, in_game: bool) -> None:
    placed: dict[str, Any] = {}
    if in_game:
        placed = {"environment": game("DigitGame", max_turns=4)}
    length = {"max_response_length": 24}
    model = game_model(tmp_path / "model")
    made = game_run(model, steps=7, generation=length, evaluate_every=3, **STREAMING | placed)
    if not in_game:
        made["task"] = {"name": "digits", "places": 2, "repeats": 6}
        made["stages"]["rl"]["rewards"] = ["accuracy"]
    made["keep"] = {"every": 2}
    config, home = write_config(tmp_path / "run.yaml", made), prepared(tmp_path / "home")
    where = ("--home", str(home), "--json")

    def command(*arguments: str) -> Finished:
        done = run_command(*arguments, *where)
        assert done.code == 0, done.text
        return done

    whole = command("run", str(config))
    for step in ("4", "5"):
        assert digest(command("fork", whole.result["run_id"], "--step", step)) == digest(whole)
    if not in_game:
        sets = [word for each in WHOLE for word in ("--set", each)]
        by_steps = command("fork", whole.result["run_id"], "--step", "4", *sets)
        assert digest(by_steps) != digest(whole)
    cooler = ("--step", "4", "--set", "stages.rl.generation.temperature=0.5")
    changed = command("fork", whole.result["run_id"], *cooler)
    assert digest(changed) != digest(whole)
    assert digest(command("fork", changed.result["run_id"], "--step", "6")) == digest(changed)
    command("replay", changed.result["run_id"], "--step", "7")
