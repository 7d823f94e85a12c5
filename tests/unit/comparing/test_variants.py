"""Variants are built from the run's own config, with what was asked for in its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posttrain.core.config.loading import load_config
from posttrain.core.config.resolve import resolve
from posttrain.core.config.spec import Spec
from posttrain.core.errors import ConfigError
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.store.artifacts import ArtifactStore
from posttrain.core.store.run_record import RunRecord
from posttrain.pipelines.analysis.past_run import PastRun
from posttrain.pipelines.analysis.variants import Wanted, build_variants
from tests.helpers.pipeline import tiny_config, write_config


@pytest.fixture
def past(tmp_path: Path, manager: PluginManager) -> PastRun:
    return past_run(tmp_path, manager)


def past_run(folder: Path, manager: PluginManager, **stage: Any) -> PastRun:
    """A run of the tiny config, as `config.yaml` of a home has it, with fields of its rl stage."""
    config = tiny_config(folder / "model")
    config["stages"]["rl"] |= stage
    first = resolve(load_config([write_config(folder / "user.yaml", config)]), manager)
    (folder / "config.yaml").write_text(first.to_yaml())
    resolved = resolve(load_config([folder / "config.yaml"]), manager)
    record = RunRecord("0123456789abcdef", "tiny", folder)
    return PastRun(record, resolved, manager, folder, ArtifactStore(folder / "artifacts"))


def test_inputs_that_other_rewards_do_not_read_are_left_out(past: PastRun) -> None:
    values = past.raw_stage("rl")
    assert set(values["inputs"]) == {"model", "reward_model"}
    assert set(past.with_stage("rl", values).config.stages["rl"].inputs) == set(values["inputs"])
    changed = past.with_stage("rl", values | {"rewards": [{"name": "accuracy", "weight": 1.0}]})
    assert changed.config.stages["rl"].inputs == {"model": "sft"}
    assert past.raw_stage("rl")["rewards"] == values["rewards"]  # the run's own is as it was


def test_an_algorithm_sets_the_loss_anew_and_options_change_one_place(past: PastRun) -> None:
    wanted = Wanted(
        algorithms=[Spec("dapo", "dapo")],
        losses=[Spec("gspo", "gspo")],
        aggregators=[Spec("token-mean", "token-mean")],
        clips=[(0.1, 0.3)],
    )
    own, dapo, gspo, mean, clip = build_variants(past, "rl", wanted, kl_coef=0.5).variants
    assert [v.label for v in (own, dapo, gspo, mean, clip)] == [
        "as run",
        "algorithm dapo",
        "loss gspo",
        "aggregation token-mean",
        "clip 0.1:0.3",
    ]
    # In force at that step for the run's own; DAPO has no KL.
    assert [v.kl_coef for v in (own, dapo, gspo, mean, clip)] == [0.5, 0.0, 0.5, 0.5, 0.5]
    losses = [v.objective.terms[0].loss for v in (own, dapo, gspo, mean, clip)]
    assert [loss.name for loss in losses] == [
        "ppo_clip",
        "ppo_clip",
        "gspo",
        "ppo_clip",
        "ppo_clip",
    ]
    assert [losses[i].config.clip_high for i in (0, 1, 4)] == [0.2, 0.28, 0.3]
    averages = [v.objective.terms[0].aggregator.name for v in (own, dapo, mean)]
    assert averages == ["seq-mean-token-mean", "token-mean", "token-mean"]


def test_without_kl_no_variant_has_any(past: PastRun) -> None:
    wanted = Wanted(algorithms=[Spec("grpo", "grpo")], without_kl=True)
    for variant in build_variants(past, "rl", wanted, kl_coef=0.5).variants:
        assert (variant.objective.kl, variant.kl_coef, variant.reward_kl) == (None, 0.0, None)


def test_kl_that_moves_between_loss_and_reward_places_rewards_anew(
    tmp_path: Path, manager: PluginManager
) -> None:
    kl = {"place": "reward", "estimator": "k1", "controller": {"name": "fixed", "coef": 0.1}}
    past = past_run(tmp_path, manager, kl=kl)
    wanted = Wanted(algorithms=[Spec("grpo", "grpo")], clips=[(0.1, 0.1)])
    own, grpo, clip = build_variants(past, "rl", wanted, kl_coef=0.0).variants
    assert (own.keeps_token_rewards, clip.keeps_token_rewards) == (True, True)
    assert (grpo.keeps_token_rewards, grpo.reward_kl) == (False, None)
    assert grpo.kl_coef > 0
    bare, _ = build_variants(
        past, "rl", Wanted(clips=[(0.1, 0.1)], without_kl=True), kl_coef=0.0
    ).variants
    assert (bare.keeps_token_rewards, bare.reward_kl) == (False, None)


def test_what_is_asked_for_twice_or_cannot_be_is_refused(past: PastRun) -> None:
    twice = Wanted(algorithms=[Spec("grpo", "grpo"), Spec("grpo", "grpo")])
    with pytest.raises(ConfigError, match="'algorithm grpo' is asked for twice"):
        build_variants(past, "rl", twice, kl_coef=0.0)
    with pytest.raises(ConfigError, match="--loss 'gsp' .*did you mean 'gspo'"):
        build_variants(past, "rl", Wanted(losses=[Spec("gsp", "gsp")]), kl_coef=0.0)


def test_a_clip_of_a_loss_without_bounds_is_refused(tmp_path: Path, manager: PluginManager) -> None:
    past = past_run(tmp_path, manager, policy_loss="vanilla_pg")
    with pytest.raises(ConfigError, match="--clip 0.1:0.2 .*'vanilla_pg', without them"):
        build_variants(past, "rl", Wanted(clips=[(0.1, 0.2)]), kl_coef=0.0)
