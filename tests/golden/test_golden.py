"""Numbers recorded from verl 0.9.1 and TRL 1.16.0, values and gradients, in float64.

A case of a plugin that we do not have is skipped under that plugin's name. Once the plugin exists
the case fails until a check for it is written here. Over 300 lines because of the table of what
each recorded function needs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from posttrain.core.contracts import (
    AdvantageEstimator,
    Aggregator,
    Counts,
    KlController,
    KlEstimator,
    PolicyLoss,
    PreferenceLoss,
    TokenLoss,
)
from posttrain.core.plugin_manager import PluginManager
from tests.helpers.batches import build_batch

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "golden"
CASES: list[dict[str, Any]] = [  # Any: JSON, whose shape depends on the case
    case for path in sorted(FOLDER.glob("*.json")) for case in json.loads(path.read_text("utf-8"))
]
if not CASES:
    pytest.skip(f"no golden files at {FOLDER}", allow_module_level=True)

MANAGER = PluginManager()
Case = dict[str, Any]

# The plugin that a case without a check here needs, by its function.
NEEDS: dict[str, tuple[str, str]] = {
    "AdaptiveKLController": ("kl_controller", "adaptive"),
    "CPOTrainer.cpo_loss": ("preference_loss", "cpo"),
    "DAPORewardManager": ("reward_shaper", "soft_overlong"),
    "DPOTrainer._compute_loss": ("preference_loss", "dpo"),
    "GMPOTrainer._compute_loss": ("policy_loss", "gmpo"),
    "KTOTrainer._compute_loss": ("preference_loss", "kto"),
    "ORPOTrainer.odds_ratio_loss": ("preference_loss", "orpo"),
    "RLOOTrainer._compute_loss": ("policy_loss", "rloo_seq"),
    "RLOOTrainer._generate_and_score_completions": ("advantage", "rloo"),
    "apply_kl_penalty": ("reward_shaper", "kl_in_reward"),
    "compute_gae_advantage_return": ("advantage", "gae"),
    "compute_gdpo_outcome_advantage": ("advantage", "gdpo"),
    "compute_gpg_outcome_advantage": ("advantage", "gpg"),
    "compute_grpo_passk_outcome_advantage": ("advantage", "pass_at_k"),
    "compute_multi_turn_optimal_token_baseline_advantage": ("advantage", "optimal_token_baseline"),
    "compute_offpolicy_metrics": ("rollout_correction", "tis_token"),
    "compute_opo_outcome_advantage": ("advantage", "opo"),
    "compute_optimal_token_baseline_advantage": ("advantage", "optimal_token_baseline"),
    "compute_pf_ppo_reweight_data": ("sampler", "pf_ppo"),
    "compute_policy_loss_bypass_mode": ("rollout_correction", "tis_token"),
    "compute_policy_loss_cispo": ("policy_loss", "cispo"),
    "compute_policy_loss_clip_cov": ("policy_loss", "clip_cov"),
    "compute_policy_loss_dppo_kl": ("policy_loss", "dppo"),
    "compute_policy_loss_dppo_tv": ("policy_loss", "dppo"),
    "compute_policy_loss_dro": ("policy_loss", "dro"),
    "compute_policy_loss_geo_mean": ("policy_loss", "gmpo"),
    "compute_policy_loss_gpg": ("policy_loss", "vanilla_pg"),
    "compute_policy_loss_gspo": ("policy_loss", "gspo_token"),
    "compute_policy_loss_kl_cov": ("policy_loss", "kl_cov"),
    "compute_policy_loss_reinforce": ("policy_loss", "vanilla_pg"),
    "compute_policy_loss_sapo": ("policy_loss", "sapo"),
    "compute_reinforce_plus_plus_baseline_outcome_advantage": (
        "advantage",
        "reinforce_pp_baseline",
    ),
    "compute_reinforce_plus_plus_outcome_advantage": ("advantage", "reinforce_pp"),
    "compute_remax_outcome_advantage": ("advantage", "remax"),
    "compute_rewards": ("reward_shaper", "kl_in_reward"),
    "compute_rloo_outcome_advantage": ("advantage", "rloo"),
    "compute_rloo_vectorized_outcome_advantage": ("advantage", "rloo"),
    "compute_rollout_correction_and_rejection_mask": ("rollout_correction", "mis_token"),
    "compute_rollout_correction_weights": ("rollout_correction", "tis_token"),
    "compute_rollout_rejection_mask": ("rollout_correction", "mis_token"),
    "compute_value_loss": ("value_loss", "value_loss"),
    "get_repetition_penalty_reward": ("reward_shaper", "repetition"),
    "get_soft_overlong_punishment": ("reward_shaper", "soft_overlong"),
}


def skip_without(kind: str, name: str) -> None:
    """Skip while there is no such plugin; fail once there is, for want of a check."""
    if any((entry.kind, entry.name) == (kind, name) for entry in MANAGER.entries()):
        pytest.fail(f"plugin {name} exists now: hold it against this case")
    pytest.skip(f"plugin {name} is not there yet")


def tensor(values: Any) -> Tensor:
    """Nested lists as float64; null is NaN."""
    return torch.tensor(np.array(values, dtype=np.float64))


def inputs_of(case: Case) -> dict[str, Tensor]:
    return {k: tensor(v) for k, v in case["inputs"].items() if k != "index"}


def check(case: Case, got: dict[str, Tensor]) -> None:
    """Every tensor of `got` is what the peer gave."""
    for name, value in got.items():
        wanted = np.array(case["outputs"][name], dtype=np.float64)
        np.testing.assert_allclose(value.detach().numpy(), wanted, err_msg=name, **case["tol"])


def check_metric(case: Case, name: str, value: Tensor, mask: Tensor) -> None:
    """The mean over `mask` is the peer's metric; peers average in float32, hence the tolerance."""
    mean = float((value.detach() * mask).sum() / mask.sum())
    assert mean == pytest.approx(case["outputs"]["metrics"][name], rel=1e-6, abs=1e-7), name


# --- aggregation ------------------------------------------------------------------------------


def verl_aggregate(loss: Tensor, mask: Tensor, mode: str, info: dict[str, Any]) -> Tensor:
    """Our aggregator `mode` with verl's explicit counts; `dp_size` undoes a mean over ranks."""
    is_norm = mode == "seq-mean-token-sum-norm"
    length = int(info.get("loss_scale_factor") or mask.shape[1])
    aggregator = MANAGER.build(Aggregator, mode, {"norm_length": length} if is_norm else {})
    counts = Counts(
        float(info.get("batch_num_tokens") or mask.sum()),
        float(info.get("global_batch_size") or (mask.sum(1) > 0).sum()),
    )
    return aggregator.aggregate(TokenLoss(loss, mask), mask, counts) * info.get("dp_size", 1)


def run_agg_loss(case: Case) -> None:
    x = inputs_of(case)
    loss_mat = x["loss_mat"].requires_grad_()
    params = case["params"]
    loss = verl_aggregate(loss_mat, x["loss_mask"], params["loss_agg_mode"], params)
    (grad,) = torch.autograd.grad(loss, loss_mat)
    check(case, {"loss": loss, "grad_loss_mat": grad})


def run_entropy_loss(case: Case) -> None:
    x = inputs_of(case)
    logits = x["logits"].requires_grad_()
    logprobs = logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    loss = verl_aggregate(entropy, x["response_mask"], case["params"]["loss_agg_mode"], {})
    (grad,) = torch.autograd.grad(loss, logits)
    check(case, {"loss": loss, "grad_logits": grad})


# --- KL ---------------------------------------------------------------------------------------

KL_NAMES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def verl_kl(name: str) -> KlEstimator[Any]:
    plugin = KL_NAMES.get(name.removesuffix("+"), name.removesuffix("+"))
    if name.endswith("+") or plugin == "abs":
        skip_without("kl", plugin + "+" * name.endswith("+"))
    fields = {"output_clamp": 10.0} if plugin == "k3" else {}
    return MANAGER.build(KlEstimator, plugin, fields)


def run_kl_penalty(case: Case) -> None:
    x, params = inputs_of(case), case["params"]
    new = x["log_prob"].requires_grad_()
    kl = verl_kl(params["kl_penalty"]).kl(new, x["ref_log_prob"])
    loss = verl_aggregate(kl, x["response_mask"], params["loss_agg_mode"], params)
    (grad,) = torch.autograd.grad(loss, new)
    check(case, {"kl": kl, "loss": loss, "grad_log_prob": grad})


def run_fixed_controller(case: Case) -> None:
    controller = MANAGER.build(KlController, "fixed", {"coef": case["params"]["kl_coef"]})
    values = []
    for kl, rows in zip(case["inputs"]["current_kl"], case["inputs"]["n_steps"], strict=True):
        controller.update(kl, kl, rows)
        values.append(controller.coefficient())
    check(case, {"value": torch.tensor(values, dtype=torch.float64)})


# --- advantages -------------------------------------------------------------------------------


def run_verl_grpo(case: Case) -> None:
    x, params = inputs_of(case), case["params"]
    names = sorted(set(map(str, case["inputs"]["index"])))
    batch = build_batch(
        x["response_mask"],
        group_id=[names.index(str(i)) for i in case["inputs"]["index"]],
        token_rewards=x["token_level_rewards"],
    )
    fields = {
        "norm_by_std": params["norm_adv_by_std_in_grpo"],
        "eps": params["epsilon"],
        "singleton": "raw",
        "zero_tol": 0.0,
    }
    got = MANAGER.build(AdvantageEstimator, "grpo", fields).estimate(batch).advantages
    check(case, {"advantages": got, "returns": got})


def run_trl_grpo_advantage(case: Case) -> None:
    params = case["params"]
    if params["multi_objective_aggregation"] != "sum_then_normalize":
        skip_without("advantage", "gdpo")
    rewards = inputs_of(case)["rewards_per_func"]
    total = (rewards * torch.tensor(params["reward_weights"])).nansum(1)
    scored = (~rewards.isnan()).any(1)
    batch = build_batch(
        torch.ones(len(total), 1),
        group_id=[row // params["num_generations"] for row in range(len(total))],
        scored=scored.tolist(),
        token_rewards=torch.where(scored, total, torch.full_like(total, torch.nan))[:, None],
    )
    fields = {"eps": params["epsilon"], "std_scope": params["scale_rewards"]}
    got = MANAGER.build(AdvantageEstimator, "grpo", fields).estimate(batch)
    check(case, {"advantages": got.advantages[:, 0]})


# --- policy losses ----------------------------------------------------------------------------


def clip_loss(x: dict[str, Tensor], **fields: object) -> tuple[Tensor, TokenLoss]:
    """Log-probs with gradient, and our clipped token loss of a case's inputs."""
    new, mask = x["log_prob"].requires_grad_(), x["response_mask"]
    advantages = x["advantages"]
    if advantages.dim() == 1:
        advantages = advantages[:, None].expand(mask.shape)
    # A case without them is on policy.
    old = x.get("old_log_prob", new.detach())
    batch = build_batch(mask, advantages=advantages, old_logprobs=old)
    return new, MANAGER.build(PolicyLoss, "ppo_clip", fields).token_loss(new, batch)


def verl_vanilla(x: dict[str, Tensor], params: dict[str, Any]) -> tuple[Tensor, TokenLoss, Tensor]:
    new, tokens = clip_loss(
        x,
        clip_low=params["clip_ratio_low"],
        clip_high=params["clip_ratio_high"],
        dual_clip_c=params["clip_ratio_c"],
    )
    weighted = tokens.loss * x.get("rollout_is_weights", torch.ones_like(tokens.loss))
    info = params.get("global_batch_info", {})
    return new, tokens, verl_aggregate(weighted, tokens.mask, params["loss_agg_mode"], info)


def run_verl_vanilla(case: Case) -> None:
    new, tokens, loss = verl_vanilla(inputs_of(case), case["params"])
    (grad,) = torch.autograd.grad(loss, new)
    check(case, {"loss": loss, "grad_log_prob": grad})
    metrics = tokens.metrics
    clipped = metrics["clip/high_frac"] + metrics["clip/low_frac"]
    check_metric(case, "actor/pg_clipfrac", clipped, tokens.mask)
    check_metric(case, "actor/pg_clipfrac_lower", metrics["clip/dual_frac"], tokens.mask)
    check_metric(case, "actor/ppo_kl", metrics["kl/old_k1"], tokens.mask)


def run_verl_actor_loss(case: Case) -> None:
    params, x = case["params"], inputs_of(case)
    missing = {"gspo": "gspo_token", "cispo": "cispo"}.get(params["loss_mode"])
    if missing is not None:
        skip_without("policy_loss", missing)
    new, tokens, loss = verl_vanilla(x, params)
    entropy, mode = x["entropy"].requires_grad_(), params["loss_agg_mode"]
    info = params["global_batch_info"]
    loss = loss - params["entropy_coeff"] * verl_aggregate(entropy, tokens.mask, mode, info)
    if params["kl_loss_coef"]:
        kl = verl_kl(params["kl_loss_type"]).kl(new, x["ref_log_prob"])
        loss = loss + params["kl_loss_coef"] * verl_aggregate(kl, tokens.mask, mode, info)
    grad, grad_entropy = torch.autograd.grad(loss, (new, entropy))
    check(case, {"loss": loss, "grad_log_prob": grad, "grad_entropy": grad_entropy})


TRL_REDUCTIONS = {
    "grpo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "luspo": "seq-mean-token-sum",
    "dapo": "token-mean",
}


def run_trl_grpo_loss(case: Case) -> None:
    params, x = case["params"], inputs_of(case)
    if params["loss_type"] not in TRL_REDUCTIONS:
        skip_without("policy_loss", params["loss_type"])
    if params["importance_sampling_level"] == "sequence":
        skip_without("policy_loss", "gspo")
    if params["off_policy_mask_threshold"] is not None:
        skip_without("rollout_correction", "opsm")
    if params["top_entropy_quantile"] < 1:
        skip_without("policy_loss", "entropy_mask")
    if params["use_bias_correction_kl"] and params["beta"]:
        skip_without("kl", "k3_is")
    new, tokens = clip_loss(
        x,
        clip_low=params["epsilon_low"],
        clip_high=params["epsilon_high"],
        dual_clip_c=params["delta"],
        ratio_clamp=None,
    )
    loss_mat, mask = tokens.loss, tokens.mask
    if "importance_sampling_ratio" in x:
        loss_mat = loss_mat * x["importance_sampling_ratio"]
    if params["beta"]:
        kl = MANAGER.build(KlEstimator, "k3", {"input_clamp": None}).kl(new, x["ref_log_prob"])
        loss_mat = loss_mat + params["beta"] * kl
        check_metric(case, "kl", kl, mask)
    mode = TRL_REDUCTIONS[params["loss_type"]]
    # TRL counts every row, empty ones too.
    info = {
        "global_batch_size": mask.shape[0],
        "loss_scale_factor": params["max_completion_length"],
    }
    if params["loss_type"] == "dapo":
        info["batch_num_tokens"] = params["num_items_in_batch"]
    loss = verl_aggregate(loss_mat, mask, mode, info)
    if params["loss_type"] != "dapo":
        loss = loss / params["gradient_accumulation_steps"]
    if params["entropy_coef"]:
        mean_entropy = (x["entropy"] * mask).sum() / mask.sum()
        loss = loss - params["entropy_coef"] * mean_entropy / params["gradient_accumulation_steps"]
    (grad,) = torch.autograd.grad(loss, new)
    check(case, {"loss": loss, "grad_log_prob": grad})
    check_metric(case, "clip_ratio/high_mean", tokens.metrics["clip/high_frac"], mask)
    check_metric(case, "clip_ratio/low_mean", tokens.metrics["clip/low_frac"], mask)


# --- preference -------------------------------------------------------------------------------


def run_trl_reward_loss(case: Case) -> None:
    x = inputs_of(case)
    chosen, rejected = x["rewards_chosen"].requires_grad_(), x["rewards_rejected"].requires_grad_()
    fields = {"centre_coef": case["params"]["center_rewards_coefficient"] or 0.0}
    margin = x.get("margin", torch.zeros_like(chosen))
    plugin = MANAGER.build(PreferenceLoss, "bradley_terry", fields)
    loss = plugin.pair_loss(chosen, rejected, margin).mean()
    grads = torch.autograd.grad(loss, (chosen, rejected))
    check(
        case,
        {"loss": loss, "grad_rewards_chosen": grads[0], "grad_rewards_rejected": grads[1]},
    )


RUNNERS: dict[str, Callable[[Case], None]] = {
    "agg_loss": run_agg_loss,
    "compute_entropy_loss": run_entropy_loss,
    "kl_penalty": run_kl_penalty,
    "FixedKLController": run_fixed_controller,
    "compute_grpo_outcome_advantage": run_verl_grpo,
    "compute_grpo_vectorized_outcome_advantage": run_verl_grpo,
    "GRPOTrainer._generate_and_score_completions": run_trl_grpo_advantage,
    "compute_policy_loss_vanilla": run_verl_vanilla,
    "ppo_loss": run_verl_actor_loss,
    "GRPOTrainer._compute_loss": run_trl_grpo_loss,
    "RewardTrainer.compute_loss": run_trl_reward_loss,
}


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_the_peer_gives_the_same_numbers(case: Case) -> None:
    function = case["function"]
    if case["kind"] == "rollout_correction" and function not in NEEDS:
        skip_without("rollout_correction", "tis_token")
    if function not in RUNNERS:
        skip_without(*NEEDS[function])
    RUNNERS[function](case)


def test_every_golden_function_is_checked_or_waits_for_a_named_plugin() -> None:
    functions = {case["function"] for case in CASES}
    assert functions <= RUNNERS.keys() | NEEDS.keys()
    assert not RUNNERS.keys() & NEEDS.keys()
    assert len(CASES) == len({case["id"] for case in CASES}) >= 270
