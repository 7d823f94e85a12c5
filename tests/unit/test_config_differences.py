"""Settings that differ from what presets and defaults make them, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.core.config.differences import differing_settings
from posttrain.core.config.loading import load_config
from posttrain.core.config.resolve import resolve
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
    differing(path, manager)
