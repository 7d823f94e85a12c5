"""Settings that differ from what presets and defaults make them, and no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.core.config import differences
from posttrain.core.config.differences import differing_settings
from posttrain.core.config.loading import load_config
from posttrain.core.config.resolve import ResolvedRun, resolve
from posttrain.core.errors import ConfigError
from posttrain.core.plugin_manager import PluginManager

REPO = Path(__file__).parents[2]


def differing(path: Path, manager: PluginManager) -> dict[str, tuple[object, object]]:
    found = differing_settings(resolve(load_config([path]), manager), manager)
    return {setting.place: (setting.default, setting.value) for setting in found}


def write(folder: Path, rl: dict[str, Any], **other: Any) -> Path:
    stage = {"kind": "rl", "inputs": {"model": "base"}, **rl}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({"task": "arithmetic", "stages": {"train": stage}, **other}))
    return path


def test_a_config_that_sets_nothing_differs_in_nothing(
    tmp_path: Path, manager: PluginManager
) -> None:
    assert differing(write(tmp_path, {}), manager) == {}


def test_what_a_preset_sets_is_no_difference_but_what_is_set_beside_it(
    tmp_path: Path, manager: PluginManager
) -> None:
    rl = {"algorithm": "dapo", "policy_loss": {"name": "dapo", "clip_high": 0.5}}
    rl["policy_loss"]["name"] = "ppo_clip"
    found = differing(write(tmp_path, rl, seed=3, limits={"num_threads": 1}), manager)
    assert found == {"seed": (0, 3), "stages.train.policy_loss.clip_high": (0.28, 0.5)}


def test_what_an_algorithm_cannot_do_without_is_told_as_set(
    tmp_path: Path, manager: PluginManager
) -> None:
    rl = {"algorithm": "grpo_process", "rewards": ["step_verdict"], "steps": 7}
    found = differing(write(tmp_path, rl), manager)
    assert found["stages.train.steps"] == (30, 7)
    assert found["stages.train.rewards"][0] is None


@pytest.mark.parametrize("path", sorted(REPO.glob("configs/recipes/*.yaml")), ids=lambda p: p.stem)
def test_every_recipe_can_be_compared_with_its_defaults(path: Path, manager: PluginManager) -> None:
    assert any(place.startswith("stages.") for place in differing(path, manager))


def test_a_task_that_needs_a_path_is_told_with_it_and_no_default(
    tmp_path: Path, manager: PluginManager
) -> None:
    data = tmp_path / "rows.jsonl"
    row = {"prompt": "What is {i}?", "answer": "{i}"}
    data.write_text("".join(f"{json.dumps(row)}\n".replace("{i}", str(i)) for i in range(40)))
    path = write(tmp_path, {"steps": 7}, task={"name": "jsonl", "path": str(data)})
    found = differing(path, manager)
    assert found["stages.train.steps"][1] == 7
    assert "task.path" not in found, "what cannot be left out is not a choice"


def test_where_nothing_less_resolves_every_setting_is_told_without_a_default(
    tmp_path: Path, manager: PluginManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = resolve(load_config([write(tmp_path, {"steps": 7})]), manager)

    def refuse(*_: object) -> ResolvedRun:
        raise ConfigError("no")

    monkeypatch.setattr(differences, "resolve", refuse)
    found = {s.place: (s.default, s.value) for s in differing_settings(resolved, manager)}
    assert found["stages.train.steps"] == (None, 7) and found["seed"] == (None, 0)
