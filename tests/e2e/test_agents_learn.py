"""A policy that learns from what a program asks it, which knows it as an API alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import public_agent
from tests.helpers.games import game, game_model, game_run, metrics_of
from tests.helpers.pipeline import prepared, run_command, write_config

pytestmark = [
    pytest.mark.usefixtures("shared_prefect"),
    pytest.mark.slow,
    pytest.mark.timeout(1800),
]
STEPS = 90


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_reward_of_a_program_s_episodes_rises(tmp_path: Path, seed: int) -> None:
    first, last = rewards(tmp_path, seed, game("Player"))
    assert last > first + 0.15  # the tiny model has five tokens in addition to the digits


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python that has the agents' package, which does not go with ours."""
    folder = tmp_path_factory.mktemp("agents")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    made = folder / "bin" / "python"
    pip = [made, "-m", "pip", "install", "-q", public_agent.PACKAGE]
    if subprocess.run(pip, capture_output=True, timeout=500).returncode:
        pytest.skip("the agents' package cannot be installed here")
    return str(made)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_reward_of_a_public_agent_s_episodes_rises(
    tmp_path: Path, seed: int, python: str
) -> None:
    environment = {"name": f"{public_agent.__file__}:PublicAgent", "python": python}
    first, last = rewards(tmp_path, seed, environment)
    assert last > first + 0.15


def rewards(folder: Path, seed: int, environment: dict[str, Any]) -> tuple[float, float]:
    """Mean rewards of the first and the last five steps in `environment`; a guess is right once in
    four at best."""
    made = game_run(
        game_model(folder / "model", seed),
        environment=environment,
        steps=STEPS,
        prompts_per_step=8,
        num_generations=8,
        generation={"max_response_length": 4},
        optimizer={"learning_rate": 3.0e-3},
    )
    home = prepared(folder / "home")
    config = write_config(folder / "run.yaml", {**made, "seed": seed})
    done = run_command("run", str(config), "--home", str(home), "--json", timeout=1500)
    assert done.code == 0, done.text
    found = metrics_of(home)
    each = [found[step]["reward/mean"] for step in range(1, STEPS + 1)]
    first, last = (sum(part) / 5 for part in (each[:5], each[-5:]))
    print(f"seed {seed}: reward {first:.3f} in the first five steps, {last:.3f} in the last five")
    return first, last
