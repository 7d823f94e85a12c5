"""RL on a taskset of verifiers, evaluated on its held-out tasks, killed and gone on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posttrain.core.kit.tiny import make_tiny_model, make_tiny_tokenizer
from tests.helpers import live
from tests.helpers.games import game_run, metrics_of
from tests.helpers.killer import WHERE, install
from tests.helpers.pipeline import prepared, run_command, write_config
from tests.helpers.verifiers_sets import write_sums

pytestmark = [pytest.mark.usefixtures("shared_prefect"), pytest.mark.slow]
STEPS = 4


def config_of(folder: Path, python: str) -> dict[str, Any]:
    tokenizer = make_tiny_tokenizer("0123456789+|", live.TEMPLATE)
    model = make_tiny_model(folder / "model", seed=1, init_std=0.02, tokenizer=tokenizer)
    made = game_run(
        model,
        evaluate=True,
        environment={"name": "verifiers", "max_requests": 4},
        steps=STEPS,
        checkpoint_every=1,
        generation={"max_response_length": 2},
    )
    path = write_sums(folder / "sets")
    made["task"] = {"name": "verifiers", "python": python, "path": str(path)}
    return made


def test_a_run_learns_from_a_taskset_and_goes_on_after_a_kill(
    verifiers_python: str, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "run.yaml", config_of(tmp_path, verifiers_python))
    home = prepared(tmp_path / "home")
    where = ("run", str(config), "--home", str(home), "--json")
    killed = run_command(
        *where, variables={"PYTHONPATH": install(tmp_path / "killer"), WHERE: "rl:3"}, timeout=500
    )
    assert killed.code == -9, killed.text
    before = metrics_of(home)
    done = run_command(*where, timeout=500)
    assert done.code == 0, done.text
    assert done.result["stages"]["rl"]["status"] == "resumed"
    found = metrics_of(home)
    assert set(found) >= set(range(1, STEPS + 1))
    for name in ("reward/mean", "env/reward/short", "env/metric/letters", "tokens/response"):
        assert before[3][name] == found[3][name], f"{name}: other episodes after the kill"
    assert found[1]["env/reward/short"] == 0.25 and found[1]["tools/turns"] == 1.0
    assert done.result["stages"]["evaluate"]["status"] == "ran"
    plan = run_command("plan", str(config), "--home", str(home), timeout=300)
    assert plan.code == 0 and "rl" in plan.text


def test_env_check_plays_a_taskset(verifiers_python: str, tmp_path: Path) -> None:
    config = write_config(tmp_path / "run.yaml", config_of(tmp_path, verifiers_python))
    where = ("--home", str(tmp_path / "home"), "--json")
    done = run_command("env", "check", str(config), "--turn", "0", *where, timeout=300)
    found = {each["check"]: each for each in done.result["checks"]}
    assert found["episodes are played to their end"]["state"] == "passed", done.text
    # The taskset pays for every short answer, so for an empty one too.
    assert done.code == 1 and found["attack: empty answers"]["state"] == "failed", done.text
