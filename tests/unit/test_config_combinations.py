"""Settings that cannot work together are refused before anything starts, with what to change.

Over 300 lines: one case for each combination, side by side so that a missing one is seen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.core.config.base import distinct_names
from posttrain.core.config.loading import load_config
from posttrain.core.config.resolve import ResolvedRun, resolve
from posttrain.core.config.rl_stage import RlStage, reward_labels
from posttrain.core.errors import ConfigError
from posttrain.core.plugin_manager import PluginManager


def resolved(
    tmp_path: Path,
    manager: PluginManager,
    dtype: str = "bfloat16",
    **stage: Any,
) -> ResolvedRun:
    config = {
        "task": "arithmetic",
        "model": {"dtype": dtype},
        "stages": {"rl": {"kind": "rl", "inputs": {"model": "base"}, **stage}},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return resolve(load_config([path]), manager)


def stage_of(run: ResolvedRun) -> RlStage:
    stage = run.config.stages["rl"]
    assert isinstance(stage, RlStage)
    return stage


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "a sequence loss with a token aggregator",
        {"algorithm": "gspo", "aggregator": "token-mean"},
        r"rl\.aggregator: policy loss 'gspo' .* takes \['seq-mean-token-mean'\], not 'token-mean'; "
        r"change the aggregator, or set allow_any_agg: true",
    ),
    (
        "a critic-free preset with gae",
        {"algorithm": "grpo", "advantage": "gae"},
        r"rl\.advantage: advantage 'gae' reads the column 'values', filled by a critic: add "
        r"`critic: \{\}`",
    ),
    (
        "a baseline by position with episodes that branch",
        {
            "advantage": "optimal_token_baseline",
            "environment": {"name": "agent", "command": ["true"]},
        },
        r"rl\.advantage: advantage 'optimal_token_baseline' compares tokens at one position of "
        r"each response, and a program's episode may have branches",
    ),
    (
        "credit for turns without an environment",
        {"algorithm": "gigpo"},
        r"rl\.advantage: advantage 'gigpo' reads the column 'turn_reward', filled by the turns of "
        r"an environment: add `environment` to the stage",
    ),
    (
        "replayed groups that nothing corrects",
        {"sampler": "replay", "rollout_correction": {"plugin": "none"}},
        r"rl\.rollout_correction\.plugin: sampler 'replay' trains on groups up to 4 policy "
        r"versions old, which 'none' does not correct; leave it out for 'tis_token'",
    ),
    (
        "a group of one with rloo",
        {"algorithm": "rloo", "num_generations": 1},
        r"rl\.num_generations: advantage 'rloo' compares .* use num_generations: 2 or more",
    ),
    (
        "clip_high below zero",
        {"policy_loss": {"name": "ppo_clip", "clip_high": -0.1}},
        r"rl\.policy_loss\.clip_high: must be greater than or equal to 0 \(got -0\.1\)",
    ),
    (
        "clip_high below zero in a list of terms",
        {"policy_loss": [{"name": "ppo_clip", "clip_high": -0.1}, "positive_lm"]},
        r"rl\.policy_loss\.0\.clip_high: must be greater than or equal to 0",
    ),
    (
        "a fixed entropy bonus next to one that moves",
        {"entropy_controller": "adaptive", "entropy_coef": 0.01},
        r"rl\.entropy_coef: entropy_controller 'adaptive' has a coefficient of its own; set "
        r"entropy_coef: 0",
    ),
    (
        "a moving reference that nobody reads",
        {"algorithm": "dapo", "kl": {"ref_update": {}}},
        r"rl\.kl\.ref_update: there is no reference policy to refresh.* or ref_update: null",
    ),
    (
        "two rules for the reference",
        {
            "kl": {
                "controller": {"name": "fixed", "coef": 0.1},
                "refresh_every": 2,
                "ref_update": {},
            }
        },
        r"rl\.kl\.ref_update: the reference follows one rule, and refresh_every is another",
    ),
    (
        "a rule with another name",
        {"kl": {"ref_update": {"rule": "refreshed"}}},
        r"rl\.kl\.ref_update\.rule: a reference that becomes the policy itself is `kl: "
        r"\{refresh_every: N\}`",
    ),
    (
        "a rate that the rule has",
        {"kl": {"ref_update": {"rule": "bema", "rate": 0.1}}},
        r"rl\.kl\.ref_update: rule: bema has a rate that falls by itself",
    ),
    (
        "an exact KL to a reference that moves between updates",
        {
            "kl": {
                "estimator": "full",
                "controller": {"name": "fixed", "coef": 0.1},
                "ref_update": {},
            },
            "num_mini_batches": 2,
        },
        r"rl\.kl\.ref_update: 'full' computes the reference in each of the 2 updates",
    ),
    (
        "a reward whose gate is not there",
        {"rewards": ["accuracy", {"name": "repetition", "only_if": "acuracy"}]},
        r"rl\.rewards\.1\.only_if: no other reward is called 'acuracy'; .* one \(accuracy\)",
    ),
    (
        "a critic that nobody reads",
        {"critic": {}},
        r"rl\.critic: advantage 'grpo' reads no values, .* set critic: null",
    ),
    (
        "process rewards of nobody",
        {"advantage": "prime"},
        r"rl\.advantage: advantage 'prime' reads the column 'process_rewards', filled by an "
        r"implicit process reward model: add `implicit_prm: \{\}`",
    ),
    (
        "a process reward model that nobody reads",
        {"implicit_prm": {}},
        r"rl\.implicit_prm: advantage 'grpo' reads no process rewards",
    ),
    (
        "a process reward model with a reference that moves",
        {"algorithm": "prime", "kl": {"refresh_every": 3}},
        r"rl\.implicit_prm: its rewards are log-ratios to the stage's input model",
    ),
    (
        "two coefficients that leave a rest",
        {
            "policy_loss": [
                {"name": "ppo_clip", "coef": {"peak": 0.5, "complement": True}},
                {"name": "ptx", "coef": {"peak": 0.5, "complement": True}},
            ]
        },
        r"rl\.policy_loss: 2 coefficients have complement: true",
    ),
    (
        "the rest of a coefficient for nobody",
        {"policy_loss": {"name": "ppo_clip", "coef": {"peak": 0.5, "complement": True}}},
        r"rl\.policy_loss: complement: true is for the other policy losses, and there is none",
    ),
    (
        "a coefficient that falls to nothing",
        {"policy_loss": [{"name": "ppo_clip"}, {"name": "ptx", "coef": {"peak": 1, "decay": 5}}]},
        r"rl\.policy_loss\.1\.coef: `decay` is the number of steps from `peak` to `valley`",
    ),
    (
        "a critic from nowhere",
        {"advantage": "gae", "critic": {"init": "checkpoint"}},
        r"rl\.critic\.path: `init: checkpoint` and `path: <directory>` belong together",
    ),
    (
        "a critic that is not there",
        {"advantage": "gae", "critic": {"init": "checkpoint", "path": "no/such"}},
        r"rl\.critic\.path: there is no folder 'no/such'",
    ),
    (
        "pre-training texts that are not there",
        {"algorithm": "ppo_ptx", "ptx": {"path": "no-such.jsonl"}},
        r"rl\.ptx\.path: there is no file 'no-such\.jsonl', expected JSON Lines",
    ),
    (
        "process rewards without a reward that scores steps",
        {"algorithm": "grpo_process"},
        r"reads the column 'step_score', filled by a reward that scores steps",
    ),
    (
        "shared prefixes without a tree",
        {"advantage": {"name": "grpo", "attribution": "hard"}},
        r"reads the column 'node_id', filled by a sampler that branches",
    ),
    (
        "a refresh of no reference",
        {"algorithm": "dapo", "kl": {"refresh_every": 5}},
        r"rl\.kl\.refresh_every: there is no reference policy to refresh",
    ),
    (
        "an exact KL in the reward",
        {
            "kl": {
                "estimator": "full",
                "place": "reward",
                "allow_biased_reward_kl": True,
                "controller": {"name": "fixed", "coef": 0.1},
            }
        },
        r"rl\.kl\.estimator: 'full' needs both models' logits",
    ),
    (
        "a KL in a reward that is not read",
        {"algorithm": "rloo", "advantage": "gdpo"},
        r"rl\.kl\.place: advantage 'gdpo' reads scores of its own, so a KL in the reward",
    ),
    (
        "one loss twice",
        {"policy_loss": ["ppo_clip", "ptx", {"name": "ptx", "coef": 2.0}]},
        r"rl\.policy_loss: 'ptx' is listed 2 times, .* keep one of them",
    ),
    (
        "only tokens that were not sampled",
        {"policy_loss": {"name": "ptx"}},
        r"rl\.policy_loss: only reads tokens that the policy did not sample",
    ),
    (
        "observations without an environment",
        {"policy_loss": ["ppo_clip", "echo"]},
        r"rl\.policy_loss: 'echo' learns what an environment wrote, and this stage has none; add "
        r"`environment`, or remove 'echo'",
    ),
    (
        "counts that are not known in time",
        {"rollout_correction": {"plugin": "opsm", "renormalise": True}},
        r"rl\.rollout_correction\.renormalise: 'opsm' decides in each micro-batch",
    ),
    (
        "the engine for the old policy where it renormalises",
        {"generation": {"top_p": 0.9}, "rollout_correction": {"bypass_old": True}},
        r"rl\.rollout_correction\.bypass_old: the engine's log-probs are renormalised .* set "
        r"bypass_old: false, or generation\.top_p: 1 and top_k: 0",
    ),
    (
        "local counts by accident",
        {"aggregator": {"name": "token-mean", "counts": "micro"}},
        r"rl\.aggregator: counts: micro makes the result depend on micro_batch_size; say "
        r"allow_local: true",
    ),
    (
        "two warm-ups",
        {"optimizer": {"warmup_steps": 3, "warmup_rollouts": 2}},
        r"rl\.optimizer: warmup_steps \(3\) and warmup_rollouts \(2\) are two ways",
    ),
    (
        "an outcome reward next to process rewards",
        {
            "algorithm": "grpo_process",
            "rewards": ["step_verdict", "accuracy"],
        },
        r"rl\.rewards\.1: advantage 'grpo_process' reads only step scores of the first reward that "
        r"scores steps, so 'accuracy' would change nothing; remove it, set weight: 0",
    ),
    (
        "an outcome reward next to process rewards as an outcome",
        {
            "advantage": "prm_sequence",
            "rewards": ["length_penalty", "step_verdict"],
        },
        r"rl\.rewards\.0: advantage 'prm_sequence' reads only step scores",
    ),
    (
        "two rewards that score steps",
        {
            "advantage": "grpo_process",
            "rewards": ["step_verdict", "step_verdict"],
        },
        r"rl\.rewards\.1: .* so 'step_verdict' would change nothing",
    ),
    (
        "rewards where only verdicts are read",
        {
            "advantage": {"name": "pass_at_k", "variant": "analytic"},
            "rewards": ["accuracy", "format"],
            "num_generations": 8,
        },
        r"rl\.rewards\.1: advantage 'pass_at_k' reads only the task's verdict",
    ),
    (
        "rewards where no loss reads advantages",
        {"policy_loss": "positive_lm", "rewards": ["exact_match"]},
        r"rl\.rewards\.0: policy loss 'positive_lm' reads only the task's verdict, so "
        r"'exact_match' would change nothing; .* or use a policy loss that reads advantages, such "
        r"as 'ppo_clip'",
    ),
    (
        "a component without a weight",
        {
            "advantage": {"name": "gdpo", "weights": [1.0, 0.0]},
            "rewards": ["accuracy", {"name": "exact_match"}],
        },
        r"rl\.rewards\.1: advantage 'gdpo' reads only rewards that its `weights` name",
    ),
    (
        "another number of weights than of rewards",
        {"advantage": {"name": "gdpo", "weights": [1.0]}, "rewards": ["accuracy", "exact_match"]},
        r"rl\.advantage\.weights: 1 weights for 2 rewards; give one per reward",
    ),
    (
        "a clip of a sum that nobody reads",
        {
            "advantage": "grpo_process",
            "rewards": ["step_verdict"],
            "reward_clip": [0, 1],
        },
        r"rl\.reward_clip: .* so the clipped sum of rewards would change nothing",
    ),
    (
        "two rewards of one label",
        {"rewards": [{"name": "accuracy", "label": "a"}, {"name": "exact_match", "label": "a"}]},
        r"rl\.rewards\.1\.label: 'a' is what records call another reward; choose another label",
    ),
    (
        "a reward that is called as the sum",
        {"rewards": [{"name": "accuracy", "label": "total"}]},
        r"rl\.rewards\.0\.label: 'total' is what records call the sum of rewards",
    ),
    (
        "a penalty by step scores, which are read without a weight",
        {"algorithm": "grpo_process", "rewards": [{"name": "step_verdict", "weight": -1}]},
        r"rl\.rewards\.0\.weight: advantage 'grpo_process' reads only step scores of .*, as they "
        r"are before the sum, so weight: -1\.0 would change nothing; remove it, or use an",
    ),
    (
        "step scores behind a gate",
        {
            "algorithm": "grpo_process",
            "rewards": [
                {"name": "step_verdict", "only_if": "accuracy"},
                {"name": "accuracy", "weight": 0},
            ],
        },
        r"rl\.rewards\.0\.only_if: .* so only_if: accuracy would change nothing",
    ),
    (
        "a verdict with a weight",
        {
            "advantage": {"name": "pass_at_k", "variant": "analytic", "k": 2},
            "rewards": [{"name": "accuracy", "weight": 0.1}],
        },
        r"rl\.rewards\.0\.weight: advantage 'pass_at_k' reads only the task's verdict, as ",
    ),
    (
        "the only loss of sampled tokens has coefficient 0",
        {"policy_loss": [{"name": "ppo_clip", "coef": 0}, "ptx"]},
        r"rl\.policy_loss: no loss that reads sampled tokens has a coefficient above 0, so no",
    ),
    (
        "a schedule that stays at 0",
        {"policy_loss": {"name": "ppo_clip", "coef": {"peak": 0, "warmup": 5}}},
        r"rl\.policy_loss: no loss that reads sampled tokens has a coefficient above 0",
    ),
    (
        "a complement that leaves nothing to the others",
        {"policy_loss": ["ppo_clip", {"name": "ptx", "coef": {"peak": 1, "complement": True}}]},
        r"rl\.policy_loss: no loss that reads sampled tokens has a coefficient above 0",
    ),
    (
        "a reward that only a loss of coefficient 0 would read",
        {
            "policy_loss": [{"name": "ppo_clip", "coef": 0}, "positive_lm"],
            "rewards": ["exact_match"],
        },
        r"rl\.rewards\.0: policy loss 'positive_lm' reads only the task's verdict, so 'exact",
    ),
    (
        "a label that MLflow has no name for",
        {"rewards": [{"name": "accuracy", "label": "a/b (2)"}]},
        r"rl\.rewards\.0\.label: ",
    ),
    (
        "a trust region in bfloat16",
        {"algorithm": "trpo"},
        r"model\.dtype: policy loss 'trpo' solves for its step, which bfloat16 is too coarse for",
    ),
]


@pytest.mark.parametrize(
    ("stage", "message"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED]
)
def test_impossible_combinations_are_refused_with_a_mend(
    tmp_path: Path, manager: PluginManager, stage: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolved(tmp_path, manager, **stage)
    assert "run.yaml:" in str(caught.value)


# The stage as written, and what of it must stand in the resolved stage.
MENDED: list[tuple[dict[str, Any], str, object]] = [
    (
        {
            "algorithm": "gspo",
            "policy_loss": {"name": "gspo", "allow_any_agg": True},
            "aggregator": "token-mean",
        },
        "aggregator.name",
        "token-mean",
    ),
    ({"algorithm": "grpo", "advantage": "gae", "critic": {}}, "critic.init", "policy"),
    ({"algorithm": "rloo", "num_generations": 2}, "advantage.name", "rloo"),
    (
        {"algorithm": "grpo_process", "rewards": ["step_verdict"]},
        "rewards.0.name",
        "step_verdict",
    ),
    (
        {
            "algorithm": "grpo_process",
            "rewards": ["step_verdict", {"name": "accuracy", "weight": 0}],
        },
        "rewards.1.weight",
        0,
    ),
    (
        {
            "advantage": "grpo",
            "rewards": [{"name": "step_verdict", "weight": 0.5}, "accuracy"],
        },
        "rewards.0.label",
        "step_verdict",
    ),
    (
        {"advantage": {"name": "pass_at_k", "variant": "analytic", "k": 2}},
        "rewards.0.name",
        "accuracy",
    ),
    ({"policy_loss": "positive_lm"}, "rewards.0.name", "accuracy"),
    (
        {
            "policy_loss": "positive_lm",
            "rewards": ["exact_match"],
            "resample": {"method": "pow"},
        },
        "resample.method",
        "pow",
    ),
    (
        {"aggregator": {"name": "token-mean", "counts": "micro", "allow_local": True}},
        "aggregator.counts",
        "micro",
    ),
    ({"rollout_correction": {"plugin": "opsm"}}, "rollout_correction.plugin.name", "opsm"),
    (
        {"generation": {"top_k": 0}, "rollout_correction": {"bypass_old": True}},
        "rollout_correction.bypass_old",
        True,
    ),
    (
        {"generation": {"top_k": 20}, "rollout_correction": {"plugin": "tis_token"}},
        "generation.top_k",
        20,
    ),
    ({"check_sync": "never"}, "check_sync", "never"),
    ({"policy_loss": ["ppo_clip", {"name": "ptx", "coef": 27.8}]}, "policy_loss.1.coef", 27.8),
]


@pytest.mark.parametrize(("stage", "place", "value"), MENDED)
def test_the_mends_that_the_messages_name_are_accepted(
    tmp_path: Path, manager: PluginManager, stage: dict[str, Any], place: str, value: object
) -> None:
    found: Any = stage_of(resolved(tmp_path, manager, **stage)).model_dump(mode="json")
    for part in place.split("."):
        found = found[int(part) if part.isdigit() else part]
    assert found == value


def test_names_are_told_apart_by_numbers() -> None:
    assert distinct_names(["a", "b", "a", "a_2", "a"]) == ["a", "b", "a_2", "a_2_2", "a_3"]
    assert distinct_names(["a", "a"], ["a", "a_2"]) == ["a_3", "a_4"]


def test_rewards_of_one_plugin_have_names_of_their_own(
    tmp_path: Path, manager: PluginManager
) -> None:
    rewards = ["accuracy", "accuracy", {"name": "exact_match", "label": "accuracy_2"}, "accuracy"]
    found = stage_of(resolved(tmp_path, manager, rewards=rewards)).rewards
    labels = ["accuracy", "accuracy_3", "accuracy_2", "accuracy_4"]
    assert [reward.label for reward in found] == labels == reward_labels(found)
    assert all("label" not in reward.fields() for reward in found)


def test_reward_components_weigh_as_the_stages_rewards_do(
    tmp_path: Path, manager: PluginManager
) -> None:
    rewards = [{"name": "accuracy", "weight": 1.0}, {"name": "format", "weight": 0.2}]
    stage = stage_of(resolved(tmp_path, manager, advantage="gdpo", rewards=rewards))
    assert stage.advantage.fields()["weights"] == [1.0, 0.2]


def test_a_warm_up_in_rollouts_needs_rollouts(tmp_path: Path, manager: PluginManager) -> None:
    path = tmp_path / "run.yaml"
    optimizer = {"warmup_rollouts": 5}
    stages = {"sft": {"kind": "sft", "inputs": {"model": "base"}, "optimizer": optimizer}}
    path.write_text(yaml.safe_dump({"task": "arithmetic", "stages": stages}))
    with pytest.raises(ConfigError, match=r"this stage has no rollouts; use warmup_steps: 5"):
        resolve(load_config([path]), manager)


def test_a_trust_region_is_accepted_in_float32(tmp_path: Path, manager: PluginManager) -> None:
    assert stage_of(resolved(tmp_path, manager, "float32", algorithm="trpo")).critic is not None


@pytest.mark.parametrize(
    "preset",
    [e.name for e in PluginManager().entries("algorithm") if e.cls.stage == "rl"],  # type: ignore[attr-defined]
)
def test_every_preset_is_a_possible_combination(
    tmp_path: Path, manager: PluginManager, preset: str
) -> None:
    extras: dict[str, dict[str, object]] = {
        "grpo_process": {"rewards": ["step_verdict"]},
        "arpo": {"environment": "tools"},
        "gigpo": {"environment": "tools"},
        "turn_grpo": {"environment": "tools"},
        "opd": {"inputs": {"model": "base", "teacher": "base"}},
        "gkd": {"inputs": {"model": "base", "teacher": "base"}},
        "mopd": {"inputs": {"model": "base", "teacher": "base"}},
    }
    run = resolved(tmp_path, manager, "float32", algorithm=preset, **extras.get(preset, {}))
    again = resolve(load_config([_written(tmp_path, run.to_yaml())]), manager)
    assert again.config == run.config, "the resolved configuration resolves to itself"


def _written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "resolved.yaml"
    path.write_text(text)
    return path


def test_any_field_of_a_preset_can_be_overridden(tmp_path: Path, manager: PluginManager) -> None:
    run = resolved(
        tmp_path,
        manager,
        algorithm="dapo",
        policy_loss={"name": "ppo_clip", "clip_high": 0.3},
        drop_groups="none",
        entropy_coef=0.01,
    )
    stage = stage_of(run)
    (term,) = stage.loss_terms
    assert term.fields()["clip_high"] == 0.3 and term.fields()["clip_low"] == 0.2
    assert stage.aggregator.name == "token-mean"
    assert stage.drop_groups == "none" and stage.entropy_coef == 0.01


def test_a_length_normaliser_defaults_to_the_response_limit(
    tmp_path: Path, manager: PluginManager
) -> None:
    generation = {"max_response_length": 77}
    stage = stage_of(resolved(tmp_path, manager, algorithm="dr_grpo", generation=generation))
    assert stage.aggregator.fields()["norm_length"] == 77
    terms = [
        {"name": "ppo_clip", "aggregator": "seq-mean-token-sum-norm"},
        {"name": "positive_lm", "coef": 0.1, "aggregator": "token-mean"},
    ]
    run = resolved(tmp_path, manager, policy_loss=terms, generation=generation)
    first = stage_of(run).loss_terms[0].aggregator
    assert first is not None and first.fields()["norm_length"] == 77
    assert {use.name for use in run.plugins["rl"]} >= {"positive_lm", "token-mean", "ppo_clip"}


@pytest.mark.parametrize(
    ("limits", "optimizer", "said"),
    [
        ({"learner_ranks": 2}, {}, r"model\.dtype: ranks keep float32 weights .* dtype: bfloat16"),
        ({}, {"rounding": "stochastic"}, r"rl\.optimizer\.rounding: .* model\.dtype: bfloat16"),
    ],
)
def test_autocast_where_something_else_holds_the_weights(
    tmp_path: Path,
    manager: PluginManager,
    limits: dict[str, Any],
    optimizer: dict[str, Any],
    said: str,
) -> None:
    stage = {"kind": "rl", "inputs": {"model": "base"}, "optimizer": optimizer}
    config = {"task": "arithmetic", "model": {"dtype": "autocast"}, "limits": limits}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config | {"stages": {"rl": stage}}))
    with pytest.raises(ConfigError, match=said):
        resolve(load_config([path]), manager)
