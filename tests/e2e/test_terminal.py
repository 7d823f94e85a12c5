"""RL on task folders: each episode in a sandbox of its own, judged by the task's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.core.sandbox.runner import levels_available
from tests.helpers import typed_shell
from tests.helpers.games import game_model, game_run, metrics_of
from tests.helpers.pipeline import prepared, run_command, write_config

pytestmark = [
    pytest.mark.usefixtures("shared_prefect"),
    pytest.mark.skipif(
        not set(levels_available()) - {"rlimits"}, reason="no sandbox here has folders of its own"
    ),
]
STEPS = 2


@pytest.mark.slow  # a sample without commands is in tests/contract/test_live_episodes.py
def test_a_run_on_task_folders_is_judged_by_their_tests_and_replays(tmp_path: Path) -> None:
    for wanted in ("1", "2", "3"):
        typed_shell.task_folder(tmp_path / "tasks" / f"write-{wanted}", wanted)
    environment = {"name": f"{typed_shell.__file__}:TypedShell", "max_turns": 2, "instructions": ""}
    model = game_model(tmp_path / "model")
    made = game_run(model, evaluate=True, environment=environment, steps=STEPS, prompts_per_step=2)
    made["task"] = {"name": "terminal", "path": str(tmp_path / "tasks")}
    made["evaluation"]["num_problems"] = 1
    config, home = write_config(tmp_path / "run.yaml", made), prepared(tmp_path / "home")
    where = ("run", str(config), "--home", str(home), "--json")
    done = run_command(*where)
    assert done.code == 0, done.text
    metrics = metrics_of(home)
    for each in (metrics[step] for step in range(1, STEPS + 1)):
        assert 0 < each["reward/mean"] < 1 and each["env/outcome"] == pytest.approx(
            each["reward/mean"]
        )
        assert each["tools/turns"] > 1 and each.get("env/failed_frac", 0) == 0
    run = str(done.result["run_id"])
    replayed = run_command("replay", run, "--step", str(STEPS), "--home", str(home), "--json")
    assert replayed.code == 0, replayed.text
    assert not any(each["differences"] for each in replayed.result["steps"]), replayed.text
    again = run_command(*where)
    assert {stage["status"] for stage in again.result["stages"].values()} == {"cached"}, again.text
    (tmp_path / "tasks" / "write-1" / "tests" / "helper").write_text("changed\n")
    planned = run_command("plan", str(config), "--home", str(home), "--json", "--no-calibration")
    reasons = [(each["cached"], each["reason"]) for each in planned.result["stages"]]
    assert all(not cached and "task's data changed" in why for cached, why in reasons), reasons
