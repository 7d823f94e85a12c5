"""What each preset expands to, against the settings of its paper."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.core.config.coefficients import coef_at
from posttrain.core.config.presets import Axis, axes_of
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.contracts import Algorithm
from posttrain.core.plugin_manager import PluginManager

# preset: advantage, policy losses, aggregator, (estimator, place, coefficient) of the KL or None
TABLE: dict[str, tuple[str, list[str], str, tuple[str, str, float] | None]] = {
    "reinforce": ("reinforce_baseline", ["vanilla_pg"], "seq-mean-token-sum", None),
    "a2c": ("a2c", ["vanilla_pg"], "token-mean", None),
    "trpo": ("gae", ["trpo"], "token-mean", None),
    "ppo": ("gae", ["ppo_clip"], "token-mean", ("k1", "reward", 0.2)),
    "ppo_dual_clip": ("gae", ["dual_clip"], "token-mean", ("k1", "reward", 0.2)),
    "ppo_penalty": ("gae", ["ppo_penalty"], "token-mean", None),
    "ppo_ptx": ("gae", ["ppo_clip", "ptx"], "token-mean", ("k1", "reward", 0.02)),
    "chord": ("grpo", ["ppo_clip", "ptx"], "token-mean", None),
    "prime": ("prime", ["ppo_clip"], "token-mean", None),
    "grpo": ("grpo", ["ppo_clip"], "seq-mean-token-mean", ("k3", "loss", 0.04)),
    "grpo_process": ("grpo_process", ["ppo_clip"], "seq-mean-token-mean", ("k3", "loss", 0.04)),
    "dr_grpo": ("dr_grpo", ["ppo_clip"], "seq-mean-token-sum-norm", None),
    "rloo": ("rloo", ["vanilla_pg"], "seq-mean-token-sum", ("k1", "reward", 0.03)),
    "reinforce_pp": ("reinforce_pp", ["ppo_clip"], "token-mean", ("k1", "reward", 0.01)),
    "remax": ("remax", ["vanilla_pg"], "seq-mean-token-sum", None),
    "gspo": ("grpo", ["gspo"], "seq-mean-token-mean", None),
    "gspo_token": ("grpo", ["gspo_token"], "seq-mean-token-mean", None),
    "dapo": ("grpo", ["ppo_clip"], "token-mean", None),
    "bapo": ("grpo", ["bapo"], "token-mean", None),
    "sapo": ("grpo", ["sapo"], "seq-mean-token-mean", None),
    "arpo": ("grpo", ["ppo_clip"], "token-mean", None),
    "gigpo": ("gigpo", ["ppo_clip"], "token-mean", ("k3", "loss", 0.01)),
    "turn_grpo": ("turn_grpo", ["ppo_clip"], "seq-mean-token-mean", None),
    "cispo": ("grpo", ["cispo"], "token-mean", None),
    "gmpo": ("grpo", ["gmpo"], "seq-mean-token-mean", None),
    "clip_cov": ("grpo", ["clip_cov"], "token-mean", None),
    "kl_cov": ("grpo", ["kl_cov"], "token-mean", None),
    "vapo": ("decoupled_gae", ["ppo_clip", "positive_lm"], "token-mean", None),
    "opd": ("zero", ["ppo_clip"], "token-mean", None),
    "gkd": ("zero", [], "token-mean", None),
    "mopd": ("zero", ["ppo_clip"], "token-mean", None),
    "sdft": ("zero", [], "seq-mean-token-mean", None),
    "sdpo": ("zero", [], "seq-mean-token-mean", None),
}

# Published numbers: preset, place, field, value.
NUMBERS: list[tuple[str, str, str, float]] = [
    ("ppo", "advantage", "lam", 0.95),
    ("ppo", "policy_loss", "clip_low", 0.2),
    ("ppo", "kl.controller", "target", 6.0),
    ("ppo_dual_clip", "policy_loss", "dual_clip_c", 3.0),
    ("trpo", "policy_loss", "delta", 0.01),
    ("trpo", "policy_loss", "damping", 0.1),
    ("trpo", "policy_loss", "cg_iters", 10),
    ("gspo", "policy_loss", "clip_low", 3e-4),
    ("gspo", "policy_loss", "clip_high", 4e-4),
    ("dapo", "policy_loss", "clip_low", 0.2),
    ("dapo", "policy_loss", "clip_high", 0.28),
    ("vapo", "policy_loss.0", "clip_high", 0.28),
    ("prime", "advantage", "process_coef", 5.0),
    ("prime", "advantage", "outcome_coef", 5.0),
    ("bapo", "policy_loss", "rho0", 0.4),
    ("bapo", "policy_loss", "low_start", 0.6),
    ("bapo", "policy_loss", "high_stop", 3.0),
    ("sapo", "policy_loss", "tau_pos", 1.0),
    ("sapo", "policy_loss", "tau_neg", 1.05),
    ("cispo", "policy_loss", "clip_low", 1.0),
    ("cispo", "policy_loss", "clip_high", 4.0),
    ("gmpo", "policy_loss", "log_clip_low", 0.4),
    ("a2c", "advantage", "gamma", 1.0),
    ("gigpo", "advantage", "gamma", 0.95),
    ("opd", "advantage_transform", "coef", 1.0),
    ("gkd", "distillation", "beta", 0.5),
    ("mopd", "advantage_transform", "coef", 1.0),
    ("sdft", "distillation", "beta", 0.5),
    ("sdft", "distillation", "top_k", 100),
    ("sdft", "distillation", "ratio_cap", 2.0),
    ("sdpo", "distillation", "ratio_cap", 2.0),
]

# Settings in addition to the axes: preset, field, value.
EXTRAS: list[tuple[str, str, Any]] = [
    ("a2c", "entropy_coef", 0.01),
    ("dapo", "sampler", "dynamic"),
    ("dapo", "rewards", ["dapo_rule", "soft_overlong"]),
    ("ppo", "epochs", 4),
    ("opd", "rewards", []),
    ("gkd", "rewards", []),
    ("mopd", "rewards", []),
    ("sdft", "rewards", []),
    ("sdft", "teachers", {"self": {"policy": {"weights": "base", "context": "worked"}}}),
    ("gkd", "policy_loss", None),
    ("vapo", "critic", {"pretrain_steps": 50}),
    ("prime", "implicit_prm", {"beta": 0.05}),
]


def preset(manager: PluginManager, name: str) -> Any:
    cls = manager.find("algorithm", name).cls
    return cls(cls.Config())


def axes(manager: PluginManager, name: str) -> dict[str, Axis]:
    return {axis.place: axis for axis in axes_of(preset(manager, name), manager)}


def test_every_rl_preset_is_in_the_table(manager: PluginManager) -> None:
    presets = [preset(manager, entry.name) for entry in manager.entries("algorithm")]
    assert {p.name for p in presets if p.stage == "rl" and not p.variant_of} == set(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_a_preset_names_the_published_plugins(manager: PluginManager, name: str) -> None:
    advantage, losses, aggregator, kl = TABLE[name]
    found = axes(manager, name)
    assert found["advantage"].name == advantage
    terms = [a for place, a in found.items() if place.startswith("policy_loss")]
    assert [a.name for a in terms if a.kind == "policy_loss"] == losses
    assert found["aggregator"].name == aggregator
    coefficient = found["kl.controller"].fields["coef"]
    place = preset(manager, name).expand()["kl"].get("place", "loss")
    if kl is None:
        assert coefficient == 0
    else:
        assert (found["kl.estimator"].name, place, coefficient) == kl


@pytest.mark.parametrize(("name", "place", "field", "value"), NUMBERS)
def test_a_preset_has_the_published_numbers(
    manager: PluginManager, name: str, place: str, field: str, value: float
) -> None:
    assert axes(manager, name)[place].fields[field] == value


@pytest.mark.parametrize(("name", "field", "value"), EXTRAS)
def test_a_preset_sets_what_is_no_plugin(
    manager: PluginManager, name: str, field: str, value: Any
) -> None:
    assert preset(manager, name).expand()[field] == value


def test_every_axis_shows_a_formula(manager: PluginManager) -> None:
    for name in TABLE:
        for axis in axes_of(preset(manager, name), manager):
            assert axis.formula, f"{name}: {axis.place}"


@pytest.mark.parametrize(
    ("variant", "weighting", "mu"),
    [
        ("phi", "phi", {1: 0.1, 500: 0.1}),
        ("mu", "none", {100: 0.475, 200: 0.05, 500: 0.05}),
    ],
)
def test_chord_imitates_by_the_schedule_of_its_variant(
    manager: PluginManager, variant: str, weighting: str, mu: dict[int, float]
) -> None:
    fields = manager.build(Algorithm, "chord", {"variant": variant}).expand()
    stage = RlStage.model_validate({"kind": "rl", "inputs": {"model": "base"}, **fields})
    clip, ptx = stage.loss_terms
    assert ptx.fields()["weighting"] == weighting
    assert stage.complements == (ptx.coef,) and clip.coef == 1.0
    assert {step: coef_at(ptx.coef, step) for step in mu} == pytest.approx(mu)
