"""What samples of an older policy change in a resolved config, and settings that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.core.config.loading import load_config
from posttrain.core.config.resolve import ResolvedRun, resolve
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.errors import ConfigError
from posttrain.core.plugin_manager import PluginManager

MANAGER = PluginManager()


def resolved(folder: Path, *overrides: str, **stage: Any) -> ResolvedRun:
    rl = {"kind": "rl", "inputs": {"model": "base"}, **stage}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({"task": "arithmetic", "stages": {"rl": rl}}))
    return resolve(load_config([path], overrides), MANAGER)


def stage_of(run: ResolvedRun) -> RlStage:
    stage = run.config.stages["rl"]
    assert isinstance(stage, RlStage)
    return stage


def correction(folder: Path, *overrides: str, **stage: Any) -> str:
    return stage_of(resolved(folder, *overrides, **stage)).rollout_correction.plugin.name


def test_fresh_samples_are_not_corrected(tmp_path: Path) -> None:
    assert correction(tmp_path) == "none"
    assert correction(tmp_path, sampler={"name": "dynamic", "surplus": "drop"}) == "none"


def test_samples_of_an_older_policy_are_corrected_by_default(tmp_path: Path) -> None:
    assert correction(tmp_path, max_staleness=1) == "tis_token"
    assert correction(tmp_path, sampler="dynamic") == "tis_token", "groups are carried over"
    run = resolved(tmp_path, max_staleness=1)
    (tmp_path / "again.yaml").write_text(run.to_yaml())
    assert resolve(load_config([tmp_path / "again.yaml"]), MANAGER).config == run.config


def test_what_the_user_says_of_the_correction_is_kept(tmp_path: Path) -> None:
    written = {"plugin": "mis_seq"}
    assert correction(tmp_path, max_staleness=1, rollout_correction=written) == "mis_seq"
    assert correction(tmp_path, max_staleness=1, rollout_correction={"plugin": "none"}) == "none"
    override = "stages.rl.rollout_correction.bypass_old=true"
    assert correction(tmp_path, override, max_staleness=1) == "none"


def test_a_single_response_is_no_group_for_dynamic_sampling(tmp_path: Path) -> None:
    fields = {"advantage": "reinforce_baseline", "sampler": "dynamic", "num_generations": 1}
    with pytest.raises(ConfigError, match=r"sampler 'dynamic' .* use num_generations: 2 or more"):
        resolved(tmp_path, **fields)


def test_the_penalty_of_long_answers_follows_the_response_limit(tmp_path: Path) -> None:
    stage = stage_of(resolved(tmp_path, algorithm="dapo", generation={"max_response_length": 1000}))
    rule, overlong = stage.rewards
    assert rule.name == "dapo_rule" and stage.sampler.name == "dynamic"
    assert (overlong.fields()["max_length"], overlong.fields()["buffer_length"]) == (1000, 200)


def test_a_buffer_longer_than_the_response_limit_is_a_config_error(tmp_path: Path) -> None:
    rewards = ["accuracy", {"name": "soft_overlong", "buffer_length": 4096}]
    with pytest.raises(ConfigError, match=r"buffer_length \(4096\) is longer than max_length"):
        resolved(tmp_path, rewards=rewards, generation={"max_response_length": 100})
