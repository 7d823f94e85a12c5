"""A search by Optuna, by the real command: trials, what is known of them, and going on."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.pipelines.sweep.record import read_record, sweep_folder
from tests.e2e.test_sweep import LEARNING_RATE, sweep_config
from tests.helpers.pipeline import prepared, run_command

pytest.importorskip("optuna", reason="Optuna is not installed (pip install 'posttrain[search]')")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_prefect")]


def test_trials_are_variants_and_a_longer_search_goes_on(tmp_path: Path) -> None:
    space = {LEARNING_RATE: {"low": 1.0e-4, "high": 1.0e-2, "log": True}}
    search = {"trials": 2, "space": space}
    path = sweep_config(tmp_path, {"seeds": [0], "search": search})
    home = prepared(tmp_path / "home")
    first = run_command("sweep", str(path), "--home", str(home), "--json")
    assert first.code == 0, first.text
    names = [row["variant"] for row in first.result["variants"]]
    assert names == ["config", "trial 1", "trial 2"]
    tried = [first.result["settings"][name][LEARNING_RATE] for name in names[1:]]
    assert all(1.0e-4 <= rate <= 1.0e-2 for rate in tried)
    assert sum("sft" in run["computed"] for run in first.result["runs"]) == 1

    longer = {"variants.search.trials": 3}
    options = [word for path_, n in longer.items() for word in ("--set", f"{path_}={n}")]
    again = run_command("sweep", str(path), "--home", str(home), "--json", *options)
    assert again.code == 0, again.text
    known = {run["variant"]: run["run_id"] for run in first.result["runs"]}
    now = {run["variant"]: run["run_id"] for run in again.result["runs"]}
    assert known.items() <= now.items()
    assert list(now) == ["config", "trial 1", "trial 2", "trial 3"]
    trials = read_record(sweep_folder(home, "tiny")).trials
    assert len(trials) == 3
    assert all(trial.done and trial.value is not None and trial.curve for trial in trials)
