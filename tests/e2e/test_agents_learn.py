"""A policy that learns from what a program asks it, which knows it as an API alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.games import game, game_model, game_run, metrics_of
from tests.helpers.pipeline import prepared, run_command, write_config

pytestmark = [pytest.mark.usefixtures("shared_prefect"), pytest.mark.slow]
STEPS = 60


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_reward_of_a_program_s_episodes_rises(tmp_path: Path, seed: int) -> None:
    made = game_run(
        game_model(tmp_path / "model", seed),
        environment=game("Player"),
        steps=STEPS,
        prompts_per_step=8,
        num_generations=8,
        generation={"max_response_length": 4},
        optimizer={"learning_rate": 3.0e-3},
    )
    home = prepared(tmp_path / "home")
    config = write_config(tmp_path / "run.yaml", {**made, "seed": seed})
    done = run_command("run", str(config), "--home", str(home), "--json", timeout=1500)
    assert done.code == 0, done.text
    found = metrics_of(home)
    rewards = [found[step]["reward/mean"] for step in range(1, STEPS + 1)]
    first, last = (sum(part) / 5 for part in (rewards[:5], rewards[-5:]))
    print(f"seed {seed}: reward {first:.3f} in the first five steps, {last:.3f} in the last five")
    # A guess is right once in four at best, and the tiny model has five other tokens.
    assert last > first + 0.15, rewards
