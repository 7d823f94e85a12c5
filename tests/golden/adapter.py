"""The bridge from the peers' recorded answers to our plugins: names and configs are translated.

`run_case` takes a case as it was recorded and returns everything the peer returned. There is no
maths here: every number comes from a plugin or from core, composed as in a run, and a peer's
convention is a field of a plugin's config. Nothing depends on a case's id or numbers.

Over 300 lines because it is one module on purpose: who doubts a number reads one file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import (
    AdvantageEstimator,
    Advantages,
    AdvantageTransform,
    Aggregator,
    Correction,
    Counts,
    DistillationLoss,
    EntropyController,
    KlController,
    KlEstimator,
    NoConfig,
    PairLoss,
    PairScores,
    PolicyLoss,
    PreferenceLoss,
    RolloutCorrection,
    TeacherRows,
    TextLoss,
    TokenLoss,
)
from posttrain.core.kit.batches import build_batch
from posttrain.core.math import groups
from posttrain.core.math.alignment import align, members, products, whole_groups
from posttrain.core.math.correction import mismatch_metrics, share
from posttrain.core.math.divergence import divergence, gathered, relative_entropy
from posttrain.core.math.groups import outcome_rewards
from posttrain.core.math.masking import row_means
from posttrain.core.math.nucleus import Cut
from posttrain.core.math.preference import FDivergence
from posttrain.core.math.returns import rewards_to_go, value_loss
from posttrain.core.math.shaping import (
    repetition_penalty,
    resampling_weights,
    soft_overlong,
)
from posttrain.core.math.teacher_gap import teacher_gap
from posttrain.core.models.paths import HeadShape
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.rewards.scoring import (
    clip_rewards,
    component_metrics,
    reward_metrics,
    weighted_sum,
)
from posttrain.core.rewards.shaping import place_on_last_token, subtract_kl
from posttrain.core.training.logprobs import cut_logprobs
from posttrain.core.training.metrics import MetricSums
from posttrain.core.training.objective import LossTerm, MicroLoss, Objective, PreparedMini
from posttrain.core.training.preference_objective import (
    LabelTokens,
    MiniCounts,
    PairTokens,
    PreferenceMicro,
    PreferenceObjective,
    PreferenceTerm,
    Scoring,
    Tokens,
    with_margin,
)
from posttrain.core.training.reward_model import reward_loss
from posttrain.plugins.policy_losses.clip_cov import ClipCovLoss

Case = dict[str, Any]  # Any: JSON, whose shape depends on the case
Outputs = dict[str, object]
MANAGER = PluginManager()


def tensor(values: Any) -> Tensor:
    """Nested lists as float64; null is NaN."""
    return torch.tensor(np.array(values, dtype=np.float64))


def inputs_of(case: Case) -> dict[str, Tensor]:
    return {name: tensor(values) for name, values in case["inputs"].items()}


def verl_aggregate(loss: Tensor, mask: Tensor, params: Mapping[str, Any]) -> Tensor:
    """Our aggregator under verl's `loss_agg_mode` and its explicit counts."""
    mode = params["loss_agg_mode"]
    fields: dict[str, object] = {
        "num_tokens": params.get("batch_num_tokens"),
        "num_seqs": params.get("global_batch_size"),
    }
    if mode == "seq-mean-token-sum-norm":
        fields["norm_length"] = params.get("loss_scale_factor", mask.shape[1])
    aggregator = MANAGER.build(Aggregator, mode, fields)
    counts = replace(aggregator.count(mask), num_ranks=params.get("dp_size", 1))
    return aggregator.aggregate(TokenLoss(loss, mask), mask, counts)


# --- KL and its controllers -------------------------------------------------------------------

VERL_KL = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def verl_kl(name: str) -> KlEstimator[Any]:
    """The estimator that verl calls `name`; its k3 bounds the value at 10."""
    base = name.removesuffix("+")
    plugin = VERL_KL.get(base, base) + "+" * name.endswith("+")
    fields = {"output_clamp": 10.0} if plugin.startswith("k3") else {}
    return MANAGER.build(KlEstimator, plugin, fields)


def run_kl_penalty(case: Case) -> Outputs:
    x, params = inputs_of(case), case["params"]
    logprobs = x["log_prob"].requires_grad_()
    kl = verl_kl(params["kl_penalty"]).kl(logprobs, x["ref_log_prob"])
    loss = verl_aggregate(kl, x["response_mask"], params)
    (grad,) = torch.autograd.grad(loss, logprobs)
    return {"kl": kl, "loss": loss, "grad_log_prob": grad}


def verl_adaptive(params: Mapping[str, Any], start: str) -> KlController[Any]:
    fields = {
        "coef": params[start],
        "target": params["target_kl"],
        "horizon": params["horizon"],
        "kl_unit": "token",
    }
    return MANAGER.build(KlController, "adaptive", fields)


def run_controller(controller: KlController[Any], case: Case) -> Outputs:
    values = []
    for kl, rows in zip(case["inputs"]["current_kl"], case["inputs"]["n_steps"], strict=True):
        controller.update(kl_per_token=kl, kl_per_sequence=float("nan"), num_rows=rows)
        values.append(controller.coefficient())
    return {"value": values}


def run_adaptive_controller(case: Case) -> Outputs:
    return run_controller(verl_adaptive(case["params"], "init_kl_coef"), case)


def run_fixed_controller(case: Case) -> Outputs:
    coef = case["params"]["kl_coef"]
    return run_controller(MANAGER.build(KlController, "fixed", {"coef": coef}), case)


# --- rollout correction -----------------------------------------------------------------------


def two_numbers(spec: object) -> tuple[float | None, float]:
    """verl's `lo_hi`, or one number as the upper bound."""
    numbers = [float(part) for part in str(spec).split("_")]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else (None, numbers[0])


def verl_rejections(params: Mapping[str, Any]) -> list[dict[str, object]]:
    """verl's comma-separated options and thresholds as our `reject`."""
    if not params.get("rollout_rs"):
        return []
    entries: list[dict[str, object]] = []
    specs = str(params["rollout_rs_threshold"]).split(",")
    for option, spec in zip(params["rollout_rs"].split(","), specs, strict=True):
        level, stat = option.rsplit("_", 1)
        low, high = two_numbers(spec)
        entries.append({"stat": stat, "level": level, "low": low, "high": high})
    return entries


def verl_correction(params: Mapping[str, Any]) -> RolloutCorrection[Any]:
    """The preset of verl's `rollout_is`, with its thresholds, rejections and statistics."""
    fields: dict[str, object] = {
        "reject": verl_rejections(params),
        "statistics": "full",
        "count_empty_seqs": True,
    }
    level = params.get("rollout_is")
    if not level:
        return MANAGER.build(RolloutCorrection, "none", fields)
    low, high = two_numbers(params["rollout_is_threshold"])
    # One number truncates; two mask what is outside.
    form = "tis" if low is None else "mis"
    fields |= {
        "low": low,
        "high": high,
        "batch_norm_w": params.get("rollout_is_batch_normalize", False),
    }
    name = f"{form}_{'seq' if level == 'sequence' else 'token'}"
    return MANAGER.build(RolloutCorrection, name, fields)


VERL_WEIGHT_STATISTICS = {
    "mean": "mean",
    "std": "std",
    "ess": "eff_sample_size",
    "high_frac": "ratio_fraction_high",
    "low_frac": "ratio_fraction_low",
    "seq_mean": "seq_mean",
    "seq_std": "seq_std",
    "seq_min": "seq_min",
    "seq_max": "seq_max",
    "seq_max_deviation": "seq_max_deviation",
    "seq_high_frac": "seq_fraction_high",
    "seq_low_frac": "seq_fraction_low",
    "outside_frac": "oob_ratio",
    "norm": "batch_norm_factor",
}
VERL_REJECT_STATISTICS = {
    "mean": "mean",
    "std": "std",
    "min": "min",
    "max": "max",
    "high_frac": "fraction_high",
    "low_frac": "fraction_low",
    "seq_mean": "seq_mean",
    "seq_std": "seq_std",
    "seq_min": "seq_min",
    "seq_max": "seq_max",
    "seq_max_deviation": "seq_max_deviation",
    "seq_high_frac": "seq_fraction_high",
    "seq_low_frac": "seq_fraction_low",
    "token_frac": "masked_fraction",
    "seq_frac": "seq_masked_fraction",
}
VERL_MISMATCH = {
    "mismatch/k1": "kl",
    "mismatch/k3": "k3_kl",
    "mismatch/ppl_ratio": "ppl_ratio",
    "mismatch/chi2_token": "chi2_token",
    "mismatch/chi2_seq": "chi2_seq",
}
VERL_ALONE = {
    "training_ppl",
    "training_log_ppl",
    "rollout_ppl",
    "rollout_log_ppl",
    "log_ppl_diff",
    "log_ppl_abs_diff",
    "log_ppl_diff_max",
    "log_ppl_diff_min",
}
"""Metrics of verl's that we do not have: `ppl_ratio` and `kl` say what they do."""


def verl_correction_metrics(
    found: Correction, params: Mapping[str, Any], prefix: str = ""
) -> dict[str, float]:
    """A correction's metrics under verl's names."""
    # Extremes are of the raw weights of whole sequences, but of the bounded ones of tokens.
    extremes = "raw_" if params.get("rollout_is") == "sequence" else ""
    weight_names = VERL_WEIGHT_STATISTICS | {f"{extremes}min": "min", f"{extremes}max": "max"}
    renamed = {}
    for name, value in found.metrics.items():
        kind, *middle, last = name.split("/")
        if kind == "is_weight" and last in weight_names:
            renamed[f"{prefix}rollout_is_{weight_names[last]}"] = value
        elif kind == "reject":
            option = "".join(f"{part}_" for part in middle)
            renamed[f"{prefix}rollout_rs_{option}{VERL_REJECT_STATISTICS[last]}"] = value
    return renamed


def verl_mismatch_metrics(
    trainer: Tensor, engine: Tensor, mask: Tensor, prefix: str = ""
) -> dict[str, float]:
    """Our diagnostics under verl's names."""
    found = mismatch_metrics(trainer, engine, mask, count_empty_seqs=True)
    return {prefix + name: found[ours] for ours, name in VERL_MISMATCH.items()}


def run_verl_weights(case: Case) -> Outputs:
    x, params = inputs_of(case), case["params"]
    found = verl_correction(params).correct(
        x["train_log_prob"], x["rollout_log_prob"], x["response_mask"]
    )
    return {"weights": found.weight, "metrics": verl_correction_metrics(found, params)}


def run_verl_rejection(case: Case) -> Outputs:
    x, params = inputs_of(case), case["params"]
    found = verl_correction(params).correct(
        x["train_log_prob"], x["rollout_log_prob"], x["response_mask"]
    )
    return {"mask": found.keep, "metrics": verl_correction_metrics(found, params)}


def run_verl_correction(case: Case) -> Outputs:
    x, params = inputs_of(case), case["params"]
    tensors = x["train_log_prob"], x["rollout_log_prob"], x["response_mask"]
    found = verl_correction(params).correct(*tensors)
    prefix = "rollout_corr/"
    metrics = verl_correction_metrics(found, params, prefix)
    metrics |= verl_mismatch_metrics(*tensors, prefix)
    mask = x["response_mask"] if found.keep is None else found.keep
    return {"weights": found.weight, "mask": mask, "metrics": metrics}


def run_verl_mismatch(case: Case) -> Outputs:
    x = inputs_of(case)
    tensors = x["train_log_prob"], x["rollout_log_prob"], x["response_mask"]
    return {"metrics": verl_mismatch_metrics(*tensors)}


def run_trl_weights(case: Case) -> Outputs:
    x, params = inputs_of(case), case["params"]
    level, form = params["vllm_importance_sampling_mode"].split("_")
    names = {"token": "token", "sequence": "seq"}
    fields = {
        "low": params["vllm_importance_sampling_clip_min"],
        "high": params["vllm_importance_sampling_clip_max"],
        "statistics": "full",
    }
    mask = x["response_mask"]
    tensors = x["train_log_prob"], x["rollout_log_prob"], mask
    name = {"truncate": "tis", "mask": "mis"}[form] + "_" + names[level]
    found = MANAGER.build(RolloutCorrection, name, fields).correct(*tensors)
    assert found.weight is not None
    # TRL leaves 1 under the mask, and one column for a whole sequence.
    ratio = torch.where(mask.bool(), found.weight, 1.0)
    if level == "sequence":
        ratio = ratio.gather(1, mask.argmax(dim=1, keepdim=True))
    prefix = "is_weight/seq_" if level == "sequence" else "is_weight/"
    gaps = mismatch_metrics(*tensors)
    metrics = {
        "sampling/sampling_logp_difference/mean": gaps["mismatch/abs_mean"],
        "sampling/sampling_logp_difference/max": gaps["mismatch/abs_max"],
    }
    for statistic in ("min", "mean", "max"):
        value = found.metrics[prefix + statistic]
        metrics[f"sampling/importance_sampling_ratio/{statistic}"] = value
    return {"importance_sampling_ratio": ratio, "metrics": metrics}


# --- value loss -------------------------------------------------------------------------------


def run_value_loss(case: Case) -> Outputs:
    x, params = inputs_of(case), case["params"]
    values, mask = x["vpreds"].requires_grad_(), x["response_mask"]
    losses, clipped = value_loss(
        values, x["values"], x["returns"], mask, clip=params["cliprange_value"]
    )
    loss = verl_aggregate(losses, mask, params)
    (grad,) = torch.autograd.grad(loss, values)
    metrics = {"vf_clipfrac": share(clipped[mask.bool()])}
    return {"loss": loss, "grad_vpreds": grad, "metrics": metrics}


# --- reward shaping ---------------------------------------------------------------------------


def shaped_by_kl(
    x: Mapping[str, Tensor], mask: Tensor, kl: KlEstimator[Any], coef: float
) -> Tensor:
    batch = build_batch(
        mask,
        token_rewards=x["token_level_scores"],
        old_logprobs=x["old_log_prob"],
        ref_logprobs=x["ref_log_prob"],
    )
    return subtract_kl(batch, kl, coef).column("token_rewards")


def run_compute_rewards(case: Case) -> Outputs:
    x = inputs_of(case)
    everything = torch.ones_like(x["token_level_scores"])
    k1 = MANAGER.build(KlEstimator, "k1")
    shaped = shaped_by_kl(x, everything, k1, case["params"]["kl_ratio"])
    return {"token_level_rewards": shaped}


def run_apply_kl_penalty(case: Case) -> Outputs:
    x, params = inputs_of(case), case["params"]
    estimator, mask = verl_kl(params["kl_penalty"]), x["response_mask"]
    controller = verl_adaptive(params, "init_kl_coef")
    coef = controller.coefficient()
    shaped = shaped_by_kl(x, mask, estimator, coef)
    # verl's mean over rows counts empty rows as 0.
    mode = {"loss_agg_mode": "seq-mean-token-mean", "global_batch_size": mask.shape[0]}
    kl = float(verl_aggregate(estimator.kl(x["old_log_prob"], x["ref_log_prob"]), mask, mode))
    controller.update(kl_per_token=kl, kl_per_sequence=float("nan"), num_rows=mask.shape[0])
    return {
        "token_level_rewards": shaped,
        "metrics": {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": coef},
        "kl_coef_after": controller.coefficient(),
    }


def run_dapo_overlong(case: Case) -> Outputs:
    x, params = inputs_of(case), case["params"]
    penalty = soft_overlong(
        x["response_lengths"],
        max_length=params["max_resp_len"],
        cache=params["overlong_buffer_len"],
        factor=params["penalty_factor"],
        floor=None,
    )
    return {"rewards": x["scores"] + penalty, "overlong_reward": penalty}


def run_trl_overlong(case: Case) -> Outputs:
    params = case["params"]
    penalty = soft_overlong(
        inputs_of(case)["response_lengths"],
        max_length=params["max_completion_len"],
        cache=params["soft_punish_cache"],
    )
    return {"rewards": penalty}


def run_trl_repetition(case: Case) -> Outputs:
    params = case["params"]
    rewards = repetition_penalty(
        case["inputs"]["completion_ids"],
        ngram=params["ngram_size"],
        penalty=abs(params["max_penalty"]),
    )
    return {"rewards": rewards}


def run_pf_ppo(case: Case) -> Outputs:
    scores, params = inputs_of(case)["token_level_scores"], case["params"]
    batch = build_batch(torch.ones_like(scores), token_rewards=scores)
    method, power = params["reweight_method"], params["weight_pow"]
    return {"weights": resampling_weights(outcome_rewards(batch), method, power)}


# === advantages =================================================================================

# verl gives a group of one its reward and has no test for equal rewards.
VERL_GROUPS: dict[str, object] = {"singleton": "raw", "zero_tol": 0.0}


def group_ids(index: Sequence[object]) -> list[int]:
    """Names of groups as numbers."""
    names = sorted({str(name) for name in index})
    return [names.index(str(name)) for name in index]


def estimate(name: str, batch: RolloutBatch, fields: dict[str, object]) -> Advantages:
    return MANAGER.build(AdvantageEstimator, name, fields).estimate(batch)


# --- verl -------------------------------------------------------------------------------------

# Inputs under the names of our columns.
VERL_COLUMNS = {
    "token_level_rewards": "token_rewards",
    "values": "values",
    "reward_baselines": "baseline_reward",
    "old_log_probs": "old_logprobs",
    "sum_pi_squared": "sum_pi_squared",
    "rollout_is_weights": "is_weight",
}


def verl_batch(case: Case) -> RolloutBatch:
    """The case's inputs as columns; every row is scored, those without tokens included."""
    given = case["inputs"]
    columns = {ours: tensor(given[k]) for k, ours in VERL_COLUMNS.items() if k in given}
    index = given.get("index")
    return build_batch(
        tensor(given["response_mask"]),
        group_id=None if index is None else group_ids(index),
        **columns,
    )


def row_runner(
    name: str, fields_of: Callable[[dict[str, Any]], dict[str, object]]
) -> Callable[[Case], Outputs]:
    """A runner of an estimator without a critic, whose `returns` verl fills with the advantages."""

    def run(case: Case) -> Outputs:
        advantages = estimate(name, verl_batch(case), fields_of(case["params"])).advantages
        return {"advantages": advantages, "returns": advantages}

    return run


def grpo_fields(params: dict[str, Any]) -> dict[str, object]:
    by_std = params["norm_adv_by_std_in_grpo"]
    return {"norm_by_std": by_std, "eps": params["epsilon"], **VERL_GROUPS}


def run_gae(case: Case) -> Outputs:
    params = case["params"]
    fields = {"gamma": params["gamma"], "lam": params["lam"], "whiten": "tokens"}
    got = estimate("gae", verl_batch(case), fields)
    return {"advantages": got.advantages, "returns": got.returns}


def run_reinforce_plus_plus(case: Case) -> Outputs:
    fields = {"gamma": case["params"]["gamma"], "whiten": "tokens"}
    got = estimate("reinforce_pp", verl_batch(case), fields)
    return {"advantages": got.advantages, "returns": got.returns}


def run_remax(case: Case) -> Outputs:
    batch = verl_batch(case)
    onwards = rewards_to_go(batch.column("token_rewards"), batch.response_mask)
    return {"advantages": estimate("remax", batch, {}).advantages, "returns": onwards}


def run_gdpo(case: Case) -> Outputs:
    params, given, mask = case["params"], case["inputs"], tensor(case["inputs"]["response_mask"])
    if "reward_components" in given:
        components = tensor(given["reward_components"]).T
        rewards, _ = weighted_sum(components, params["reward_weights"] or [1.0] * len(components.T))
        dense = place_on_last_token(rewards, mask)
    else:  # the reward is the only component
        dense = tensor(given["token_level_rewards"])
        rewards = groups.outcome_rewards(build_batch(mask, token_rewards=dense))
        components = rewards[:, None]
    batch = build_batch(
        mask,
        group_id=group_ids(given["index"]),
        token_rewards=dense,
        rewards=rewards,
        reward_components=components,
    )
    fields: dict[str, object] = {
        "weights": params["reward_weights"],
        "component_norm": "std" if params["norm_adv_by_std_in_grpo"] else "centre",
        "eps": params["epsilon"],
        "whiten": "tokens",
        **VERL_GROUPS,
    }
    advantages = estimate("gdpo", batch, fields).advantages
    return {"advantages": advantages, "returns": advantages}


def optimal_token_baseline(align: str) -> Callable[[Case], Outputs]:
    def run(case: Case) -> Outputs:
        batch = verl_batch(case)
        fields: dict[str, object] = {
            "align": align,
            "handle_zero_tail": case["params"]["handle_zero_tail"],
            "weighted": batch.is_weight is not None,
            "eps": case["params"]["epsilon"],
            **VERL_GROUPS,
        }
        got = estimate("optimal_token_baseline", batch, fields)
        # verl does not cut these returns to the mask.
        everywhere = torch.ones_like(batch.response_mask)
        onwards = rewards_to_go(batch.column("token_rewards"), everywhere)
        return {"advantages": got.advantages, "returns": onwards}

    return run


# --- TRL --------------------------------------------------------------------------------------


def trl_batch(case: Case) -> RolloutBatch:
    """Rows of a prompt adjacent; a case without a mask has no log-probs, so one token will do.

    Every row stays in the mask, unscored ones too.
    """
    params, given = case["params"], case["inputs"]
    components = tensor(given["rewards_per_func"])
    rewards, scored = weighted_sum(components, params["reward_weights"])
    shaped = clip_rewards(rewards, *(params.get("reward_clip_range") or (None, None)))
    num_rows = len(rewards)
    mask = tensor(given.get("response_mask", [[1]] * num_rows))
    names = {"old_log_prob": "old_logprobs", "ref_log_prob": "ref_logprobs"}
    return build_batch(
        mask,
        group_id=[row // params["num_generations"] for row in range(num_rows)],
        scored=scored.tolist(),
        rewards=rewards,
        token_rewards=place_on_last_token(shaped, mask),
        reward_components=components,
        **{ours: tensor(given[k]) for k, ours in names.items() if k in given},
    )


def trl_outputs(
    batch: RolloutBatch, got: Advantages, *, deviates_over_batch: bool = False
) -> Outputs:
    """One advantage per row, and TRL's record of the rewards with unbiased deviations."""
    components, scored = batch.column("reward_components"), batch.column("scored")
    rewards = batch.column("rewards")
    names = [f"r{k}" for k in range(components.shape[1])]
    ours = reward_metrics(rewards, scored, ddof=1) | component_metrics(components, names, ddof=1)
    parts = torch.zeros_like(batch.group_id) if deviates_over_batch else batch.group_id
    metrics = {
        "reward": ours["reward/mean"],
        "reward_std": ours["reward/std"],
        "frac_reward_zero_std": groups.equal_share(rewards, parts, scored),
    }
    for name in names:
        metrics[f"rewards/{name}/mean"] = ours[f"reward/component/{name}"]
        metrics[f"rewards/{name}/std"] = ours[f"reward/component_std/{name}"]
    return {"advantages": got.advantages[:, 0], "metrics": metrics}


def run_trl_grpo_advantage(case: Case) -> Outputs:
    params, batch = case["params"], trl_batch(case)
    if params["multi_objective_aggregation"] == "normalize_then_sum":
        fields = {
            "weights": params["reward_weights"],
            "eps": params["epsilon"],
            "whiten": "sequences",
            "whiten_eps": params["epsilon"],
        }
        return trl_outputs(batch, estimate("gdpo", batch, fields), deviates_over_batch=True)
    fields = {"eps": params["epsilon"], "std_scope": params["scale_rewards"]}
    over_batch = params["scale_rewards"] == "batch"
    return trl_outputs(batch, estimate("grpo", batch, fields), deviates_over_batch=over_batch)


def run_trl_rloo_advantage(case: Case) -> Outputs:
    params, batch = case["params"], trl_batch(case)
    k1, has_kl = MANAGER.build(KlEstimator, "k1"), params["beta"] != 0
    shaped = subtract_kl(batch, k1, params["beta"]) if has_kl else batch
    fields = {
        "whiten": "sequences" if params["normalize_advantages"] else "off",
        "whiten_eps": params["epsilon"],
    }
    outputs = trl_outputs(batch, estimate("rloo", shaped, fields))
    if has_kl:
        kl = k1.kl(batch.column("old_logprobs"), batch.column("ref_logprobs"))
        mean = MANAGER.build(Aggregator, "token-mean").aggregate(
            TokenLoss(kl, batch.mask), batch.mask, Counts.of(batch.mask)
        )
        metrics = outputs["metrics"]
        assert isinstance(metrics, dict)
        metrics["kl"] = float(mean)
    return outputs


GRPO = row_runner("grpo", grpo_fields)


# === policy losses ==============================================================================

Params = Mapping[str, Any]  # Any: JSON
Fields = dict[str, object]


class RecordedWeights(RolloutCorrection[NoConfig]):
    """The rollout weights [B, T] that a case holds."""

    name = "recorded"
    Config = NoConfig

    def __init__(self, weight: Tensor) -> None:
        super().__init__(NoConfig())
        self.weight = weight

    def correct(self, logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Correction:
        """The weights as recorded."""
        return Correction(weight=self.weight.expand_as(mask))


class RecordedDraw(ClipCovLoss):
    """`clip_cov` with the random order of its candidates that a case holds."""

    perm: Tensor

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """The order as recorded."""
        assert self.perm.shape == (count,), "the peer had other candidates"
        return self.perm


def weights_of(x: Mapping[str, Tensor]) -> RecordedWeights | None:
    for name in ("rollout_is_weights", "importance_sampling_ratio"):
        if name in x:
            return RecordedWeights(x[name])
    return None


def batch_of(x: Mapping[str, Tensor]) -> RolloutBatch:
    """A case's inputs as a batch; the policy before the step is the one that takes it."""
    mask, advantages, now = x["response_mask"], x["advantages"], x["log_prob"].detach()
    if advantages.dim() == 1:
        advantages = advantages[:, None].expand_as(mask)
    # A case without old log-probs is on policy.
    old = x.get("old_log_prob", now)
    columns = {
        "advantages": advantages,
        "old_logprobs": old,
        "logprobs_now": now,
        "rollout_logprobs": x.get("sampling_log_prob", old),
    }
    for ours, name in (("ref_logprobs", "ref_log_prob"), ("entropy", "entropy")):
        if name in x:
            columns[ours] = x[name]
    return build_batch(mask).with_columns(**columns)


@dataclass(frozen=True)
class Result:
    """What an objective gave on the whole of a case, its gradients and its metrics."""

    loss: MicroLoss
    prepared: PreparedMini
    grads: Outputs
    tokens: MetricSums = field(default_factory=MetricSums)

    def metrics(self, names: Mapping[str, str]) -> dict[str, float]:
        """Ours under a peer's names; what our loss does not have is 0, as a clip it never does."""
        return {peer: self.tokens.mean(ours, default=0.0) for peer, ours in names.items()}

    def outputs(self, metrics: Mapping[str, float]) -> Outputs:
        return {"loss": self.loss.total, **self.grads, "metrics": dict(metrics)}


def run_objective(
    objective: Objective,
    case_inputs: dict[str, Tensor],
    *,
    kl_coef: float = 0.0,
    dp_size: int = 1,
    entropy_parts: int = 1,
) -> Result:
    """One mini-batch through an objective, as the learner takes it; one of `dp_size` ranks.

    An entropy aggregator of local counts takes it for one of `entropy_parts` micro-batches.
    """
    x = case_inputs
    logprobs = x["log_prob"].requires_grad_()
    entropy = x.get("entropy", torch.zeros_like(logprobs)).requires_grad_()
    batch, _ = objective.correct(batch_of(x))
    prepared = on_ranks(objective.prepare(batch, torch.Generator()), dp_size)
    counts = replace(prepared.entropy_counts, num_parts=entropy_parts)
    prepared = replace(prepared, entropy_counts=counts)
    loss = objective.loss(logprobs, entropy, batch, prepared, kl_coef)
    grad, grad_entropy = torch.autograd.grad(
        loss.total, (logprobs, entropy), materialize_grads=True
    )
    grads: Outputs = {"grad_log_prob": grad, "grad_entropy": grad_entropy}
    result = Result(loss, prepared, {n: g for n, g in grads.items() if n[len("grad_") :] in x})
    for name, (value, where) in loss.tokens.items():
        result.tokens.add(name, value, where)
    return result


def on_ranks(prepared: PreparedMini, num_ranks: int) -> PreparedMini:
    def shared(counts: Counts) -> Counts:
        return replace(counts, num_ranks=num_ranks)

    return replace(
        prepared,
        term_counts=tuple(
            tuple(shared(each) for each in counts) for counts in prepared.term_counts
        ),
        counts=shared(prepared.counts),
        entropy_counts=shared(prepared.entropy_counts),
    )


# --- verl: aggregation and entropy ------------------------------------------------------------


def verl_aggregator(mode: str, info: Params, width: int) -> Aggregator[Any]:
    """verl's `loss_agg_mode` with its explicit counts; the norm length defaults to the width."""
    fields: Fields = {
        "num_tokens": info.get("batch_num_tokens"),
        "num_seqs": info.get("global_batch_size"),
    }
    if mode == "seq-mean-token-sum-norm":
        fields["norm_length"] = info.get("loss_scale_factor", width)
    return MANAGER.build(Aggregator, mode, fields)


def aggregate(values: Tensor, mask: Tensor, mode: str, info: Params) -> Tensor:
    aggregator = verl_aggregator(mode, info, mask.shape[1])
    counts = replace(aggregator.count(mask), num_ranks=info.get("dp_size", 1))
    return aggregator.aggregate(TokenLoss(values, mask), mask, counts)


def run_agg_loss(case: Case) -> Outputs:
    x, params = inputs_of(case), case["params"]
    losses = x["loss_mat"].requires_grad_()
    loss = aggregate(losses, x["loss_mask"], params["loss_agg_mode"], params)
    (grad,) = torch.autograd.grad(loss, losses)
    return {"loss": loss, "grad_loss_mat": grad}


def entropy_of(logits: Tensor) -> Tensor:
    """Entropy [B, T] of `logits` [B, T, V] as training has it: of an output layer that is 1."""
    rows = logits.flatten(0, -2)
    head = torch.eye(rows.shape[1]).to(rows)
    targets = torch.zeros(len(rows), dtype=torch.int64)
    return cut_logprobs(rows, head, targets, Cut())[1].view(logits.shape[:-1])


def run_entropy_loss(case: Case) -> Outputs:
    x, params = inputs_of(case), case["params"]
    logits = x["logits"].requires_grad_()
    loss = aggregate(entropy_of(logits), x["response_mask"], params["loss_agg_mode"], {})
    (grad,) = torch.autograd.grad(loss, logits)
    return {"loss": loss, "grad_logits": grad}


# --- verl: policy losses ----------------------------------------------------------------------


def clip_fields(params: Params) -> Fields:
    return {"clip_low": params["clip_ratio_low"], "clip_high": params["clip_ratio_high"]}


def dppo_fields(divergence: str) -> Callable[[Params], Fields]:
    return lambda params: {
        "divergence": divergence,
        "delta_low": params["clip_ratio_low"],
        "delta_high": params["clip_ratio_high"],
        "ratio_max": params["clip_ratio_c"],
        "anchor": "old",
    }


KL_NAME = {"actor/ppo_kl": "kl/old_k1"}
CLIP_NAMES = KL_NAME | {
    "actor/pg_clipfrac": "clip/frac",
    "actor/pg_clipfrac_lower": "clip/dual_frac",
}


@dataclass(frozen=True)
class VerlLoss:
    """Our loss for one of verl's: its config from verl's parameters, its metrics by verl's names.

    `by_sequence` says that verl averages over sequences whatever the mode, under the global counts;
    `agg_fields` is set where it ignores counts and mode.
    """

    name: str
    fields: Callable[[Params], Fields]
    metrics: Mapping[str, str]
    agg_fields: Fields | None = None
    by_sequence: bool = False

    def build(self, params: Params) -> PolicyLoss[Any]:
        return MANAGER.build(PolicyLoss, self.name, self.fields(params))

    def aggregator(self, params: Params, width: int) -> Aggregator[Any]:
        if self.agg_fields is not None:
            return MANAGER.build(Aggregator, "seq-mean-token-mean", self.agg_fields)
        mode = "seq-mean-token-mean" if self.by_sequence else params["loss_agg_mode"]
        return verl_aggregator(mode, params.get("global_batch_info", {}), width)

    def num_ranks(self, params: Params) -> int:
        ignored = self.agg_fields is not None
        return 1 if ignored else params.get("global_batch_info", {}).get("dp_size", 1)


VERL_LOSSES = {
    "vanilla": VerlLoss(
        "ppo_clip",
        lambda params: clip_fields(params) | {"dual_clip_c": params["clip_ratio_c"]},
        CLIP_NAMES,
    ),
    "dppo_tv": VerlLoss("dppo", dppo_fields("tv"), CLIP_NAMES),
    "dppo_kl": VerlLoss("dppo", dppo_fields("kl"), CLIP_NAMES),
    "gspo": VerlLoss(
        "gspo_token",
        lambda params: clip_fields(params) | {"log_ratio_max": 10.0, "ratio_clamp": None},
        CLIP_NAMES,
    ),
    "sapo": VerlLoss(
        "sapo",
        lambda params: {"tau_pos": params["tau_pos"], "tau_neg": params["tau_neg"]},
        CLIP_NAMES,
        by_sequence=True,
    ),
    "cispo": VerlLoss("cispo", clip_fields, CLIP_NAMES),
    "geo_mean": VerlLoss(
        "gmpo",
        lambda params: {
            "log_clip_low": params["clip_ratio_low"],
            "log_clip_high": params["clip_ratio_high"],
            "ratio_clamp": None,
            "adv_reduce": "mean",
        },
        KL_NAME
        | {
            "actor/pg_clipfrac": "clip/band_pos_frac",
            "actor/pg_clipfrac_lower": "clip/band_neg_frac",
        },
        agg_fields={"count_empty_seqs": True},
    ),
    "gpg": VerlLoss("vanilla_pg", lambda params: {}, {}),
    "reinforce": VerlLoss("vanilla_pg", lambda params: {}, KL_NAME),
    "dro": VerlLoss("dro", lambda params: {"beta": params["dro_beta"]}, KL_NAME),
    "clip_cov": VerlLoss(
        "clip_cov",
        lambda params: (
            clip_fields(params)
            | {
                "cov_ratio": params["clip_cov_ratio"],
                "cov_low": params["clip_cov_lb"],
                "cov_high": params["clip_cov_ub"],
                "ratio_clamp": None,
            }
        ),
        KL_NAME | {"actor/pg_clipfrac": "cov/picked_frac"},
    ),
    "kl_cov": VerlLoss(
        "kl_cov",
        lambda params: {
            "cov_ratio": params["kl_cov_ratio"],
            "kl_coef": params["ppo_kl_coef"],
            "ratio_clamp": None,
        },
        {"actor/ppo_kl": "kl/old_abs"},
    ),
}


def run_verl_loss(case: Case) -> Outputs:
    x, params = inputs_of(case), case["params"]
    peer = VERL_LOSSES[params["loss_mode"]]
    aggregator = peer.aggregator(params, x["response_mask"].shape[1])
    objective = Objective(
        (LossTerm(peer.build(params), aggregator),), aggregator, correction=weights_of(x)
    )
    result = run_objective(objective, x, dp_size=peer.num_ranks(params))
    return result.outputs(result.metrics(peer.metrics))


def run_verl_clip_cov(case: Case) -> Outputs:
    x, params = inputs_of(case), case["params"]
    peer = VERL_LOSSES["clip_cov"]
    loss = RecordedDraw(peer.build(params).config)
    loss.perm = x["perm"].long()
    aggregator = peer.aggregator(params, x["response_mask"].shape[1])
    objective = Objective((LossTerm(loss, aggregator),), aggregator, correction=weights_of(x))
    result = run_objective(objective, x)
    dropped = loss.dropped(batch_of(x), torch.Generator()).tolist()
    return result.outputs(result.metrics(peer.metrics)) | {"dropped_tokens": dropped}


def run_verl_bypass(case: Case) -> Outputs:
    x, params = inputs_of(case), case["params"]
    settings = params["rollout_correction"]
    peer = VERL_LOSSES[{"ppo_clip": "vanilla", "reinforce": "reinforce"}[settings["loss_type"]]]
    aggregator = peer.aggregator(params, x["response_mask"].shape[1])
    objective = Objective(
        (LossTerm(peer.build(params), aggregator),),
        aggregator,
        correction=verl_correction(settings),
        bypass_old=True,
        renormalise=True,
    )
    result = run_objective(objective, x)
    prefix, found = "rollout_corr/", Correction(metrics=result.prepared.metrics)
    tensors = x["log_prob"].detach(), x["old_log_prob"], x["response_mask"]
    return result.outputs(
        result.metrics(peer.metrics)
        | verl_correction_metrics(found, settings, prefix)
        | verl_mismatch_metrics(*tensors, prefix)
    )


def run_verl_actor_loss(case: Case) -> Outputs:
    x, params = inputs_of(case), case["params"]
    peer, info = VERL_LOSSES[params["loss_mode"]], params["global_batch_info"]
    width = x["entropy"].shape[1]
    objective = Objective(
        (LossTerm(peer.build(params), peer.aggregator(params, width)),),
        verl_aggregator(params["loss_agg_mode"], info, width),
        kl=verl_kl(params["kl_loss_type"]) if params["kl_loss_type"] else None,
        entropy_coef=params["entropy_coeff"],
        correction=weights_of(x),
    )
    dp_size = info.get("dp_size", 1)
    result = run_objective(objective, x, kl_coef=params["kl_loss_coef"], dp_size=dp_size)
    return {"loss": result.loss.total, **result.grads}


# --- TRL --------------------------------------------------------------------------------------


def trl_clip_fields(params: Params) -> Fields:
    return {
        "clip_low": params["epsilon_low"],
        "clip_high": params["epsilon_high"],
        "ratio_clamp": None,
    }


def trl_grpo_loss(params: Params) -> PolicyLoss[Any]:
    kind, level = params["loss_type"], params["importance_sampling_level"]
    if kind == "vespo":
        names = ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
        fields: Fields = {name: params[f"vespo_{name}"] for name in names}
        return MANAGER.build(PolicyLoss, "vespo", fields | {"mask_weights": False})
    fields = {"ratio_level": level, "ratio_clamp": None}
    if kind == "cispo":
        # TRL's epsilon_high is the cap itself, and there is no lower bound.
        return MANAGER.build(PolicyLoss, "cispo", fields | {"weight_max": params["epsilon_high"]})
    fields |= {"allow_any_agg": True}
    if kind == "sapo":
        fields |= {f"tau_{side}": params[f"sapo_temperature_{side}"] for side in ("pos", "neg")}
        return MANAGER.build(PolicyLoss, "sapo", fields)
    fields |= trl_clip_fields(params) | {"dual_clip_c": params["delta"]}
    return MANAGER.build(PolicyLoss, "ppo_clip", fields)


LOCAL: Fields = {"counts": "micro", "allow_local": True}
TRL_REDUCTIONS: dict[str, tuple[str, Fields]] = {
    "grpo": ("seq-mean-token-mean", {"count_empty_seqs": True}),
    "sapo": ("seq-mean-token-mean", {"count_empty_seqs": True}),
    "bnpo": ("token-mean", LOCAL),
    "dr_grpo": ("seq-mean-token-sum-norm", {"count_empty_seqs": True}),
    "luspo": ("seq-mean-token-sum", {"count_empty_seqs": True}),
    "dapo": ("token-mean", {}),
    "cispo": ("token-mean", {}),
    "vespo": ("token-mean", {}),
}


def trl_aggregator(params: Params) -> Aggregator[Any]:
    name, fields = TRL_REDUCTIONS[params["loss_type"]]
    if "num_items_in_batch" in params:
        fields = fields | {"num_tokens": params["num_items_in_batch"]}
    if name == "seq-mean-token-sum-norm":
        fields = fields | {"norm_length": params["max_completion_length"]}
    return MANAGER.build(Aggregator, name, fields)


def trl_kl(params: Params) -> KlEstimator[Any] | None:
    if not params["beta"]:
        return None
    if params.get("use_bias_correction_kl"):
        return MANAGER.build(KlEstimator, "k3_is", {"is_ratio": "policy", "input_clamp": None})
    return MANAGER.build(KlEstimator, "k3", {"input_clamp": None})


def trl_correction(x: Mapping[str, Tensor], params: Params) -> RolloutCorrection[Any] | None:
    """Recorded weights, or the off-policy mask; it is against the sampler if that is known."""
    threshold = params.get("off_policy_mask_threshold")
    if threshold is None:
        return weights_of(x)
    anchor = "roll" if "sampling_log_prob" in x else "old"
    return MANAGER.build(RolloutCorrection, "opsm", {"delta": threshold, "anchor": anchor})


TRL_CLIP_NAMES = {
    "clip_ratio/low_mean": "clip/low_frac",
    "clip_ratio/high_mean": "clip/high_frac",
    "clip_ratio/region_mean": "clip/frac",
}


def trl_clip_metrics(result: Result, *, by_row: bool) -> dict[str, float]:
    """Clip fractions of tokens, or of rows, empty ones too; the extremes are always of rows."""
    rows = MetricSums()
    for name in TRL_CLIP_NAMES.values():
        value, where = result.loss.tokens[name]
        of_rows = row_means(value, where)
        rows.add(name, of_rows, torch.ones_like(of_rows))
        rows.add_extremes(name, of_rows, torch.ones_like(of_rows))
    means, found = rows if by_row else result.tokens, rows.result()
    return {
        **{trl: means.mean(ours, default=0.0) for trl, ours in TRL_CLIP_NAMES.items()},
        "clip_ratio/low_min": found["clip/low_frac/min"],
        "clip_ratio/high_max": found["clip/high_frac/max"],
    }


def trl_metrics(result: Result, params: Params) -> dict[str, float]:
    """A GRPO loss's metrics under TRL's names."""
    kind, by_row = params["loss_type"], params["importance_sampling_level"] == "sequence"
    metrics = result.metrics({"kl": "kl/ref"} if params["beta"] else {})
    if kind in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo"):
        metrics |= trl_clip_metrics(result, by_row=by_row)
    elif kind == "cispo":
        clipped = trl_clip_metrics(result, by_row=by_row)
        metrics["cispo_clip_ratio"] = clipped["clip_ratio/high_mean"]
    elif kind == "vespo":
        # The mean is over all rows, empty ones too.
        phi, rows = result.loss.tokens["vespo/phi"][0], MetricSums()
        rows.add("vespo/phi_seq_mean", phi, torch.ones_like(phi))
        metrics |= rows.result()
    return metrics


def run_trl_grpo_loss(case: Case) -> Outputs:
    x, params = inputs_of(case), case["params"]
    aggregator = trl_aggregator(params)
    # A sum over the items of all accumulation steps needs no further division by their number; the
    # entropy is averaged in each of them.
    steps = params["gradient_accumulation_steps"]
    scale = 1.0 if "num_items_in_batch" in params else 1 / steps
    objective = Objective(
        (LossTerm(trl_grpo_loss(params), aggregator, scale),),
        aggregator,
        kl=trl_kl(params),
        entropy_coef=params["entropy_coef"],
        entropy_aggregator=MANAGER.build(Aggregator, "token-mean", LOCAL),
        correction=trl_correction(x, params),
        top_entropy=params["top_entropy_quantile"],
    )
    result = run_objective(objective, x, kl_coef=params["beta"] * scale, entropy_parts=steps)
    metrics = trl_metrics(result, params)
    if params["entropy_coef"]:
        metrics["entropy_coef"] = objective.entropy_coef
        metrics["policy_loss"] = float(result.loss.parts["loss/policy"])
    return result.outputs(metrics)


def filled(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rows without tokens, to which TRL gives the ratio 1, as rows of one token that did not move.

    Such a row adds its advantage to the loss, and in TRL nothing to the gradient or to fractions
    of tokens: those are taken from the rows as they are.
    """
    mask = x["response_mask"]
    first = torch.zeros_like(mask).bool()
    first[:, 0] = ~mask.bool().any(dim=1)
    moved = {n: torch.where(first, x["old_log_prob"], x[n]) for n in x if n.endswith("log_prob")}
    return x | moved | {"response_mask": torch.where(first, 1.0, mask)}


def run_trl_gmpo(case: Case) -> Outputs:
    x, params = inputs_of(case), case["params"]
    fields: Fields = {
        "log_clip_low": params["epsilon_low"],
        "log_clip_high": params["epsilon_high"],
        "ratio_clamp": None,
    }
    scale = 1 / params["gradient_accumulation_steps"]
    aggregator = MANAGER.build(Aggregator, "seq-mean-token-mean", {"count_empty_seqs": True})
    term = LossTerm(MANAGER.build(PolicyLoss, "gmpo", fields), aggregator, scale)
    objective = Objective(
        (term,), aggregator, kl=trl_kl(params), top_entropy=params["top_entropy_quantile"]
    )
    result = run_objective(objective, x, kl_coef=params["beta"] * scale)
    metrics = result.metrics({"kl": "kl/ref"} if params["beta"] else {})
    metrics |= trl_clip_metrics(result, by_row=False)
    whole = run_objective(objective, filled(inputs_of(case)), kl_coef=params["beta"] * scale)
    return result.outputs(metrics) | {"loss": whole.loss.total}


def run_trl_rloo_loss(case: Case) -> Outputs:
    x = inputs_of(case)
    loss = MANAGER.build(PolicyLoss, "rloo_seq", trl_clip_fields(case["params"]))
    aggregator = MANAGER.build(Aggregator, "seq-mean-token-mean", {"count_empty_seqs": True})
    objective = Objective((LossTerm(loss, aggregator),), aggregator)
    result, whole = run_objective(objective, x), run_objective(objective, filled(x))
    return result.outputs(trl_clip_metrics(result, by_row=True)) | {"loss": whole.loss.total}


# === preferences ================================================================================

TRL_METRICS = {
    "rewards/chosen": "rewards/chosen",
    "rewards/rejected": "rewards/rejected",
    "rewards/accuracies": "rewards/accuracy",
    "rewards/margins": "rewards/margin",
    "logps/chosen": "logps/chosen",
    "logps/rejected": "logps/rejected",
    "kl": "kto/z_ref",
    "log_odds_chosen": "pref/log_odds",
    "log_odds_ratio": "pref/log_sigmoid_odds",
    "min_reward": "rm/reward/min",
    "mean_reward": "rm/reward_mean",
    "max_reward": "rm/reward/max",
    "accuracy": "rm/pair_accuracy",
    "margin": "rm/margin",
}
DIVERGENCES: dict[str, FDivergence] = {
    "reverse_kl": "reverse_kl",
    "forward_kl": "forward_kl",
    "js_divergence": "js",
    "alpha_divergence": "alpha",
}
SMOOTHED = ("robust", "exo_pair", "aot", "aot_unpaired")
"""TRL's DPO losses that read label_smoothing; `sigmoid` ignores it."""


def tensors(case: Case, *with_grad: str) -> dict[str, Tensor]:
    """The inputs as float64; those named carry gradients."""
    found = {
        name: torch.tensor(value, dtype=torch.float64) for name, value in case["inputs"].items()
    }
    for name in with_grad:
        found[name].requires_grad_()
    return found


def peer_metrics(case: Case, ours: dict[str, float]) -> dict[str, float]:
    """Our metrics under the peer's names; TRL logs a KL of 0 where none is computed."""
    names = case["outputs"].get("metrics", {})
    return {name: ours.get(TRL_METRICS[name], 0.0) for name in names}


def outputs(
    case: Case, loss: Tensor, x: dict[str, Tensor], with_grad: Sequence[str], **more: object
) -> Outputs:
    grads = torch.autograd.grad(loss, [x[name] for name in with_grad], materialize_grads=True)
    named = {f"grad_{name}": grad for name, grad in zip(with_grad, grads, strict=True)}
    return {"loss": loss.detach(), **named, **more}


def whole(
    objective: PreferenceObjective, tokens: Tokens
) -> tuple[PreferenceMicro, dict[str, float]]:
    """Loss and metrics of a mini-batch in one piece."""
    prepared, sums = objective.prepare(tokens), MetricSums()
    micro = objective.loss(tokens, MiniCounts.of(tokens), prepared)
    micro.record(sums)
    return micro, with_margin(sums.result()) | dict(prepared.metrics)


def term(name: str, coef: float = 1.0, **fields: object) -> PreferenceTerm:
    return PreferenceTerm(MANAGER.build(PreferenceLoss, name, fields), coef)


def dpo_term(name: str, coef: float, params: dict[str, Any]) -> PreferenceTerm:
    """One of the losses that TRL's DPO trainer knows."""
    beta, smoothing = params["beta"], params["label_smoothing"]
    if name == "sft":
        return term("sft", coef)
    if name == "ipo":
        return term("ipo", coef, tau=beta)
    fields: dict[str, object] = {"beta": beta}
    if name in SMOOTHED:
        fields["label_smoothing"] = smoothing
    if name == "discopop":
        fields["tau"] = params["discopop_tau"]
    return term("dpo" if name == "sigmoid" else name, coef, **fields)


def run_dpo(case: Case) -> Outputs:
    params, policy = case["params"], ("chosen_log_prob", "rejected_log_prob")
    x = tensors(case, *policy)
    scoring = Scoring(
        f_divergence=DIVERGENCES[params["f_divergence_type"]],
        alpha=params.get("f_alpha_divergence_coef", 0.5),
        ld_alpha=params["ld_alpha"],
        wpo=params["use_weighting"],
    )
    named = zip(params["loss_type"], params["loss_weights"], strict=True)
    terms = [dpo_term(name, coef, params) for name, coef in named]
    tokens = PairTokens(
        x["chosen_log_prob"],
        x["rejected_log_prob"],
        x["chosen_mask"],
        x["rejected_mask"],
        x["ref_chosen_log_prob"],
        x["ref_rejected_log_prob"],
        x.get("chosen_log_sum_sq_probs"),
        x.get("rejected_log_sum_sq_probs"),
    )
    objective = PreferenceObjective(tuple(terms), scoring, reward_scale=params["beta"])
    micro, metrics = whole(objective, tokens)
    return outputs(case, micro.total, x, policy, metrics=peer_metrics(case, metrics))


def run_kto(case: Case) -> Outputs:
    params, x = case["params"], tensors(case, "log_prob")
    plugin = term(
        params["loss_type"],
        beta=params["beta"],
        desirable_weight=params["desirable_weight"],
        undesirable_weight=params["undesirable_weight"],
    )
    tokens = LabelTokens(
        x["log_prob"],
        x["mask"],
        x["label"],
        x["ref_log_prob"],
        x.get("kl_log_prob"),
        x.get("ref_kl_log_prob"),
        x.get("kl_mask"),
    )
    micro, metrics = whole(PreferenceObjective((plugin,)), tokens)
    return outputs(case, micro.total, x, ("log_prob",), metrics=peer_metrics(case, metrics))


def run_reward(case: Case) -> Outputs:
    answers = ("rewards_chosen", "rewards_rejected")
    x, sums = tensors(case, *answers), MetricSums()
    coef = case["params"]["center_rewards_coefficient"]
    fields = {} if coef is None else {"centre_coef": coef}
    plugin = MANAGER.build(PairLoss, "bradley_terry", fields)
    scores = PairScores.of_rewards(x["rewards_chosen"], x["rewards_rejected"], x.get("margin"))
    loss = reward_loss(plugin, scores, sums)
    return outputs(case, loss, x, answers, metrics=peer_metrics(case, sums.result()))


SIDES = ("chosen", "rejected")


def run_sequences(case: Case, plugin: PreferenceTerm) -> Outputs:
    """A reference-free loss of sequence log-probs: answers of one token have just these."""
    answers = ("chosen_seq_log_prob", "rejected_seq_log_prob")
    x = tensors(case, *answers)
    chosen, rejected = x[answers[0]][:, None], x[answers[1]][:, None]
    tokens = PairTokens(chosen, rejected, torch.ones_like(chosen), torch.ones_like(rejected))
    micro, metrics = whole(PreferenceObjective((plugin,), reference_free=True), tokens)
    rewards = {f"{side}_rewards": micro.rows[f"rewards/{side}"][0] for side in SIDES}
    losses = micro.losses.detach()
    found = outputs(case, micro.total, x, answers, losses=losses, **rewards)
    wanted = peer_metrics(case, metrics)
    return found | {"metrics": wanted} if wanted else found


def run_cpo(case: Case) -> Outputs:
    params = case["params"]
    kind: Literal["sigmoid", "simpo", "hinge", "ipo"] = params["loss_type"]
    beta, smoothing, alpha = params["beta"], params["label_smoothing"], params["alpha"]
    if kind == "simpo":
        plugin = term(
            "simpo",
            beta=beta,
            gamma=params["simpo_gamma"],
            alpha_po=alpha,
            label_smoothing=smoothing,
        )
    elif kind == "sigmoid":
        plugin = term("cpo", beta=beta, cpo_alpha=0.0, label_smoothing=smoothing, alpha_po=alpha)
    elif kind == "ipo":
        plugin = term("ipo", tau=beta, alpha_po=alpha)
    else:
        plugin = term("hinge", beta=beta, alpha_po=alpha)
    return run_sequences(case, plugin)


def run_orpo(case: Case) -> Outputs:
    """TRL gives the term that its trainer subtracts, so the factor here is -1."""
    plugin = term("orpo", -1.0, beta=case["params"]["beta"], sft_coef=0.0)
    return run_sequences(case, plugin)


# === regression =================================================================================


def run_a_star_po(case: Case) -> Outputs:
    """Sequence log-probs as answers of one token; the advantage is the reward less V*."""
    x, params = inputs_of(case), case["params"]
    logprobs = x["seq_log_prob"].requires_grad_()
    batch = build_batch(torch.ones(len(logprobs), 1)).with_columns(
        advantages=(x["rewards"] - x["v_star"])[:, None],
        ref_logprobs=x["ref_seq_log_prob"][:, None],
    )
    loss = MANAGER.build(PolicyLoss, "a_star_po", {"beta": params["beta2"]})
    aggregator = MANAGER.build(Aggregator, "seq-mean-token-mean")
    result = loss.token_loss(logprobs[:, None], batch)
    total = aggregator.aggregate(result, batch.mask, aggregator.count(batch.mask))
    (grad,) = torch.autograd.grad(total, logprobs)
    means = {name: value.mean() for name, value in result.metrics.items()}
    metrics = {
        "implicit_reward": float(means["a_star_po/implied_reward"]),
        "advantage": float(means["a_star_po/advantage"]),
    }
    return {"loss": total, "grad_seq_log_prob": grad, "metrics": metrics}


def run_optimal_values(case: Case) -> Outputs:
    """V* is what the advantage takes off a group's rewards; TRL drops prompts without any."""
    params, scores = case["params"], inputs_of(case)["rewards_per_func"]
    num_prompts, num_samples = scores.shape[:2]
    rewards, _ = weighted_sum(scores.flatten(0, 1), params["reward_weights"])
    mask = torch.ones(len(rewards), 1, dtype=torch.float64)
    batch = build_batch(
        mask,
        group_id=[row // num_samples for row in range(len(rewards))],
        token_rewards=rewards[:, None],
    )
    found = estimate("optimal_value", batch, {"beta": params["beta1"], "zero_tol": 0.0})
    by_prompt = rewards.reshape(num_prompts, num_samples)
    advantages = found.advantages.reshape(num_prompts, num_samples)
    kept = [float(bool(row.any())) for row in by_prompt]
    return {"v_star": (by_prompt - advantages)[:, 0], "kept": kept}


# === entropy bonus ==============================================================================


def run_trl_entropy_control(case: Case) -> Outputs:
    """Steps of micro-batches whose advantages are 0; TRL averages the bonus in each of them."""
    params = case["params"]
    fields = {
        "coef": params["entropy_coef"],
        "target": params["entropy_target"],
        "delta": params["entropy_coef_delta"],
        "min_coef": params["entropy_coef_min"],
        "max_coef": params["entropy_coef_max"],
    }
    controller = MANAGER.build(EntropyController, "adaptive", fields)
    aggregator = MANAGER.build(Aggregator, "token-mean", LOCAL)
    term = LossTerm(MANAGER.build(PolicyLoss, "importance_pg"), aggregator)
    objective = Objective((term,), aggregator, entropy_controller=controller)
    found: dict[str, list[Any]] = {"loss": [], "entropy_coef": [], "world_entropy": []}
    steps = zip(case["inputs"]["entropy"], case["inputs"]["mask"], strict=True)
    for values, masks in steps:
        entropy, mask = tensor(values).flatten(0, 1), tensor(masks).flatten(0, 1)
        none = torch.zeros_like(entropy)
        batch = batch_of({"response_mask": mask, "advantages": none, "log_prob": none})
        parts = params["gradient_accumulation_steps"]
        prepared, sums = objective.prepare(batch, torch.Generator(), parts), MetricSums()
        losses = []
        for rows in torch.arange(len(mask)).chunk(parts):
            micro = batch.select(rows)
            loss = objective.loss(none[rows], entropy[rows], micro, prepared.rows(rows))
            losses.append(float(loss.total))
            sums.add("entropy/mean", entropy[rows], micro.mask)
        controller.update(sums.mean("entropy/mean", default=0.0))
        found["loss"].append(losses)
        found["entropy_coef"].append(controller.state()["coef"])
        found["world_entropy"].append(sums.mean("entropy/mean", default=0.0))
    return dict(found)


# === supervised fine-tuning =====================================================================


def run_trl_sft(case: Case) -> Outputs:
    """The loss of an SFT stage as a term of its own, with TRL's count of tokens."""
    x, params = inputs_of(case), case["params"]
    weighting = {"nll": "none", "dft": "dft"}[params["loss_type"]]
    loss = MANAGER.build(PolicyLoss, "ptx", {"weighting": weighting})
    fields = {"num_tokens": params["num_items_in_batch"]}
    aggregator = MANAGER.build(Aggregator, "token-mean", fields)
    logprobs, batch = x["log_prob"].requires_grad_(), build_batch(x["mask"])
    total = aggregator.aggregate(
        loss.token_loss(logprobs, batch), batch.mask, aggregator.count(batch.mask)
    )
    (grad,) = torch.autograd.grad(total, logprobs)
    return {"loss": total, "grad_log_prob": grad}


RUNNERS: dict[tuple[str, str], Callable[[Case], Outputs]] = {
    ("kl", "kl_penalty"): run_kl_penalty,
    ("kl_controller", "AdaptiveKLController"): run_adaptive_controller,
    ("kl_controller", "FixedKLController"): run_fixed_controller,
    ("rollout_correction", "compute_rollout_correction_weights"): run_verl_weights,
    ("rollout_correction", "compute_rollout_rejection_mask"): run_verl_rejection,
    ("rollout_correction", "compute_rollout_correction_and_rejection_mask"): run_verl_correction,
    ("rollout_correction", "compute_offpolicy_metrics"): run_verl_mismatch,
    ("rollout_correction", "GRPOTrainer._generate_and_score_completions"): run_trl_weights,
    ("value_loss", "compute_value_loss"): run_value_loss,
    ("reward_shape", "compute_rewards"): run_compute_rewards,
    ("reward_shape", "apply_kl_penalty"): run_apply_kl_penalty,
    ("reward_shape", "DAPORewardManager"): run_dapo_overlong,
    ("reward_shape", "get_soft_overlong_punishment"): run_trl_overlong,
    ("reward_shape", "get_repetition_penalty_reward"): run_trl_repetition,
    ("reward_shape", "compute_pf_ppo_reweight_data"): run_pf_ppo,
    ("advantage", "GRPOTrainer._generate_and_score_completions"): run_trl_grpo_advantage,
    ("advantage", "RLOOTrainer._generate_and_score_completions"): run_trl_rloo_advantage,
    ("advantage", "compute_gae_advantage_return"): run_gae,
    ("advantage", "compute_gdpo_outcome_advantage"): run_gdpo,
    ("advantage", "compute_gpg_outcome_advantage"): row_runner(
        "gpg", lambda p: {"f_norm": p["f_norm"], "verl_compat": True, **VERL_GROUPS}
    ),
    ("advantage", "compute_grpo_outcome_advantage"): GRPO,
    ("advantage", "compute_grpo_passk_outcome_advantage"): row_runner("pass_at_k", grpo_fields),
    ("advantage", "compute_grpo_vectorized_outcome_advantage"): GRPO,
    ("advantage", "compute_multi_turn_optimal_token_baseline_advantage"): optimal_token_baseline(
        "valid"
    ),
    ("advantage", "compute_opo_outcome_advantage"): row_runner("opo", lambda p: VERL_GROUPS),
    ("advantage", "compute_optimal_token_baseline_advantage"): optimal_token_baseline("padded"),
    ("advantage", "compute_reinforce_plus_plus_baseline_outcome_advantage"): row_runner(
        "reinforce_pp_baseline", lambda p: VERL_GROUPS
    ),
    ("advantage", "compute_reinforce_plus_plus_outcome_advantage"): run_reinforce_plus_plus,
    ("advantage", "compute_remax_outcome_advantage"): run_remax,
    ("advantage", "compute_rloo_outcome_advantage"): row_runner("rloo", lambda p: VERL_GROUPS),
    ("advantage", "compute_rloo_vectorized_outcome_advantage"): row_runner(
        "rloo", lambda p: {"zero_tol": 0}
    ),
    ("agg", "agg_loss"): run_agg_loss,
    ("agg", "compute_entropy_loss"): run_entropy_loss,
    **{("policy_loss", f"compute_policy_loss_{mode}"): run_verl_loss for mode in VERL_LOSSES},
    ("policy_loss", "compute_policy_loss_clip_cov"): run_verl_clip_cov,
    ("policy_loss", "compute_policy_loss_bypass_mode"): run_verl_bypass,
    ("policy_loss", "ppo_loss"): run_verl_actor_loss,
    ("policy_loss", "GRPOTrainer._compute_loss"): run_trl_grpo_loss,
    ("policy_loss", "GMPOTrainer._compute_loss"): run_trl_gmpo,
    ("policy_loss", "RLOOTrainer._compute_loss"): run_trl_rloo_loss,
    ("preference", "DPOTrainer._compute_loss"): run_dpo,
    ("preference", "KTOTrainer._compute_loss"): run_kto,
    ("preference", "RewardTrainer.compute_loss"): run_reward,
    ("preference", "CPOTrainer.cpo_loss"): run_cpo,
    ("preference", "ORPOTrainer.odds_ratio_loss"): run_orpo,
    ("regression", "A2POTrainer.compute_loss"): run_a_star_po,
    ("regression", "A2POTrainer._estimate_optimal_values"): run_optimal_values,
    ("entropy_controller", "GRPOTrainer._compute_loss"): run_trl_entropy_control,
    ("sft", "SFTTrainer.compute_loss"): run_trl_sft,
}


# === distillation ===============================================================================


def divergence_fields(beta: float) -> Fields:
    """TRL's `beta`: 0 and 1 are switches."""
    names = {0.0: "forward", 1.0: "reverse"}
    return {"divergence": names[beta]} if beta in names else {"divergence": "jsd", "beta": beta}


@dataclass(frozen=True)
class Distilled:
    """The losses [B, T] of a divergence, and its metrics."""

    loss: Tensor
    mask: Tensor
    metrics: Mapping[str, Tensor]

    def aggregated(self, name: str, counted: Tensor | None = None, **fields: object) -> Tensor:
        """The loss over the mask; `counted` makes the counts where it is another."""
        counted = self.mask if counted is None else counted
        aggregator = MANAGER.build(Aggregator, name, fields)
        return aggregator.aggregate(
            TokenLoss(self.loss, self.mask), counted, aggregator.count(counted)
        )

    def total(self, name: str) -> Tensor:
        """A metric summed over the mask."""
        return torch.where(self.mask.bool(), self.metrics[name], 0.0).sum()


def distilled(
    z: Tensor, fields: Fields, mask: Tensor | None = None, **teacher: Tensor | None
) -> Distilled:
    """`gkd` at every token of logits `z` [..., V]; `teacher` are fields of `TeacherRows`."""
    shape = z.shape[:-1]
    rows = {
        name: None if value is None else value.reshape(shape.numel(), *value.shape[len(shape) :])
        for name, value in teacher.items()
    }
    rows.setdefault("sampled", torch.zeros(shape.numel(), dtype=torch.int64))
    said = TeacherRows(**{"sampled": rows.pop("sampled"), **rows})  # type: ignore[arg-type]
    found = MANAGER.build(DistillationLoss, "gkd", fields).rows(z.flatten(0, -2), said)
    scored = found.scored.reshape(shape).to(z.dtype)
    mask = scored if mask is None else mask * scored
    metrics = {name: column.reshape(shape) for name, column in found.metrics.items()}
    return Distilled(found.loss.reshape(shape), mask, metrics)


def grad_of(loss: Tensor, logits: Tensor) -> Outputs:
    (grad,) = torch.autograd.grad(loss, logits, allow_unused=True, materialize_grads=True)
    return {"loss": loss, "grad_student_logits": grad}


def reduced(found: Distilled, params: Params, *, has_mask: bool = True) -> Tensor:
    """TRL's reductions; `mean` divides by the vocabulary as well, which nobody wants."""
    reduction, counts = params.get("reduction", "batchmean"), params.get("num_items_in_batch")
    if reduction == "sum":
        return found.aggregated("token-sum")
    if not has_mask and counts is None:
        return found.aggregated("seq-mean-token-sum")
    return found.aggregated("token-mean", num_tokens=counts)


def run_jsd(case: Case) -> Outputs:
    x, params = inputs_of(case), case["params"]
    logits, teacher = x["student_logits"].requires_grad_(), x["teacher_logits"]
    fields = divergence_fields(params["beta"])
    if params.get("logits_are_probs"):
        log_s, log_t = (p.clamp(min=1e-8).log() for p in (logits, teacher))
        share = params["beta"] if 0 < params["beta"] < 1 else 0.5
        values = divergence(log_s, log_t, fields["divergence"], share)  # type: ignore[arg-type]
        found = Distilled(values, x.get("mask", torch.ones_like(values)), {})
    else:
        fields["temperature"] = params["temperature"]
        if params.get("top_k"):
            rest = "tail" if params["add_tail"] else "renorm"
            fields |= {"support": "topk", "top_k": params["top_k"], "rest": rest}
        found = distilled(logits, fields, x.get("mask"), logits=teacher)
    loss = reduced(found, params, has_mask="mask" in x)
    if params.get("reduction") == "mean":
        loss = loss / logits.shape[-1]
    return grad_of(loss, logits)


def run_sparse_top_1(case: Case) -> Outputs:
    x, params = inputs_of(case), case["params"]
    logits, beta = x["student_logits"].requires_grad_(), params["beta"]
    sampled = params["reverse_kl_top_1_mode"] == "sampled"
    of = "teacher_and_sampled" if sampled else "union"
    if beta == 1:
        of = "sampled" if sampled else "student"
    fields = divergence_fields(beta) | {
        "support": "topk",
        "top_k": 1,
        "of": "teacher" if beta == 0 else of,
        "rest": "tail" if params["add_tail"] else "renorm",
    }
    tau = params["temperature"]  # the sampling temperature
    found = distilled(
        logits / tau,
        fields,
        x["mask"],
        logits=x["teacher_logits"] / tau,
        sampled=x["completion_ids"].long(),
    )
    return grad_of(reduced(found, params), logits)


def candidates(x: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A server's candidates; one that it did not give is -1, with -inf."""
    ids, logprobs = x["teacher_topk_ids"], x["teacher_topk_log_prob"]
    known = ~(ids.isnan() | logprobs.isnan())
    if "candidate_mask" in x:
        known &= x["candidate_mask"].bool()
    return {
        "topk_ids": torch.where(known, ids, -1).long(),
        "topk_logprobs": torch.where(known, logprobs, -torch.inf),
    }


def run_server_forward_kl(case: Case) -> Outputs:
    x, params = inputs_of(case), case["params"]
    logits = x["student_logits"].requires_grad_()
    fields: Fields = {
        "divergence": "forward",
        "support": "topk",
        "rest": "tail" if params["add_tail"] else "renorm",
    }
    found = distilled(logits, fields, x["mask"], **candidates(x))
    return grad_of(found.aggregated("token-mean", x["mask"]), logits)


def run_jsd_chunk(case: Case) -> Outputs:
    x, params = inputs_of(case), case["params"]
    logits = x["student_logits"].requires_grad_()
    fields = divergence_fields(params["beta"]) | {
        "support": "topk",
        "of": "teacher",
        "rest": "tail" if params["add_tail_bucket"] else "renorm",
    }
    found = distilled(logits / params["temperature"], fields, **candidates(x))
    as_row = replace(found, loss=found.loss[None], mask=found.mask[None])
    outputs = grad_of(as_row.aggregated("token-sum"), logits)
    outputs["metrics"] = {"teacher_entropy_sum": found.total("distil/teacher_entropy")}
    if "per_teacher" in case["outputs"]:
        rows = [x["teacher_index"] == k for k in range(params["num_teachers"])]
        sums = [
            [
                own.sum(),
                found.loss.detach()[own].sum(),
                found.metrics["distil/teacher_entropy"][own].sum(),
            ]
            for own in rows
        ]
        outputs["per_teacher"] = torch.tensor(sums)
    return outputs


def run_chunked_divergence(case: Case) -> Outputs:
    x, params = inputs_of(case), case["params"]
    logits, cap = x["student_logits"].requires_grad_(), params["final_logit_softcapping"]
    bent = [
        HeadShape(params["logit_scale"], cap, 1.0).of(z) / params["temperature"]
        for z in (logits, x["teacher_logits"])
    ]
    found = distilled(bent[0], divergence_fields(params["beta"]), x["mask"], logits=bent[1])
    entropy = entropy_of(bent[0].detach())
    outputs = grad_of(reduced(found, params), logits)
    outputs["metrics"] = {
        "entropy_sum": (entropy * x["mask"]).sum(),
        "n_valid": x["mask"].sum(),
    }
    return outputs


def run_iw_opd(case: Case) -> Outputs:
    x, params, mask = inputs_of(case), case["params"], tensor(case["inputs"]["mask"])
    logits = x["student_logits"].requires_grad_()
    now = torch.log_softmax(logits / params["temperature"], dim=-1)
    now = now.gather(-1, x["completion_ids"].long()[..., None]).squeeze(-1)
    sampler = x.get("rollout_log_prob", now.detach())
    batch = build_batch(mask, teacher_logprobs=x["teacher_log_prob"], rollout_logprobs=sampler)
    fields: Fields = {"gamma": params["gamma"], "eps": params["epsilon"]}
    transform = MANAGER.build(AdvantageTransform, "iw_opd", fields)
    got = transform.transform(torch.zeros_like(now), batch)
    batch = batch.with_columns(advantages=got.advantages)
    loss = MANAGER.build(PolicyLoss, "vanilla_pg").token_loss(now, batch)
    found = Distilled(loss.loss, mask, {})
    outputs = grad_of(reduced(found, params), logits)
    counted = max(float(mask.sum()), 1.0)
    ours = {f"iw_opd/{k}_weight": got.metrics[f"distil/weight_{k}"] for k in ("mean", "min", "max")}
    outputs["metrics"] = ours | {
        "iw_opd/mean_advantage": got.advantages.sum() / counted,
        "iw_opd/mean_abs_advantage": teacher_gap(batch, "rollout").abs().sum() / counted,
    }
    return outputs


def run_self_distillation(case: Case) -> Outputs:
    x, params = inputs_of(case), case["params"]
    logits, mask = x["student_logits"].requires_grad_(), x["completion_mask"]
    skip = params.get("num_loss_tokens_to_skip", 0)
    ids = x["completion_ids"].long()
    mode, tau = params["distillation_mode"], params["temperature"]
    fields = divergence_fields(params["distillation_alpha"])
    fields["ratio_cap"] = params["distillation_is_clip"]
    if mode == "sampled_token":
        fields["support"] = "sampled"
    elif mode == "topk_logits":
        rest = "tail" if params["distillation_add_tail"] else "renorm"
        fields |= {"support": "topk", "of": "student", "top_k": params["distillation_topk"]}
        fields["rest"] = rest
    now = torch.log_softmax(logits / tau, dim=-1).gather(-1, ids[..., None]).squeeze(-1)
    old = x.get("old_log_prob", now.detach())
    taught_rows = x.get("self_distillation_mask", torch.ones(len(mask)))[:, None]
    counted = mask * taught_rows * (mask.cumsum(dim=1) > skip)
    found = distilled(
        logits / tau,
        fields,
        counted,
        logits=x["teacher_logits"] / tau,
        sampled=ids,
        old_logprobs=old,
    )
    value = found.aggregated("seq-mean-token-mean", count_empty_seqs=True)
    weight = params.get("distillation_weight", 1.0)
    metrics = {"self_distillation/distillation_loss": found.aggregated("token-mean").detach()}
    total = weight * value
    if weight < 1:
        given = {"log_prob": now, "response_mask": mask, "advantages": x["advantages"]}
        batch = batch_of({**given, "old_log_prob": old})
        level = params["importance_sampling_level"]
        clip = {
            "clip_low": params["epsilon_low"],
            "clip_high": params["epsilon_high"],
            "ratio_level": level,
            "allow_any_agg": True,
            "ratio_clamp": None,
        }
        loss = MANAGER.build(PolicyLoss, "ppo_clip", clip).token_loss(now, batch)
        name, more = TRL_REDUCTIONS[params["loss_type"]]
        if name == "seq-mean-token-sum-norm":
            more = more | {"norm_length": params["max_completion_length"]}
        policy = Distilled(loss.loss, mask, {}).aggregated(name, **more)
        metrics["self_distillation/policy_loss"] = policy.detach()
        total = total + (1 - weight) * policy
    outputs = grad_of(total / params["gradient_accumulation_steps"], logits)
    return {**outputs, "metrics": metrics}


def run_verl_forward_kl(case: Case) -> Outputs:
    x, params = inputs_of(case), case["params"]
    logits = x["student_logits"].requires_grad_()
    fields: Fields = {
        "divergence": "forward",
        "support": "topk",
        "top_k": params["topk"],
        "rest": "raw",
        "log_prob_floor": params["log_prob_min_clamp"],
    }
    found = distilled(logits, fields, x["response_mask"], **candidates(x))
    outputs = grad_of(found.aggregated("token-sum"), logits)
    overlap = found.metrics["distil/overlap"] * params["topk"]
    # What verl calls a token's advantage: the part of the divergence on common candidates.
    log_s, said = torch.log_softmax(logits.detach(), dim=-1), candidates(x)
    best = log_s.topk(params["topk"], dim=-1).indices
    common = (said["topk_ids"][..., None] == best[..., None, :]).any(dim=-1)
    ids = torch.where(common, said["topk_ids"], -1)
    floor = -torch.inf if params["log_prob_min_clamp"] is None else params["log_prob_min_clamp"]
    theirs = torch.where(common, said["topk_logprobs"].clamp(min=floor), -torch.inf)
    ours = gathered(log_s.flatten(0, -2), ids.flatten(0, -2)).view_as(theirs).clamp(min=floor)
    gap = -relative_entropy(theirs, ours)
    whole = {
        "kl": found.loss,
        "student_mass": found.metrics["distil/student_mass"],
        "teacher_mass": found.metrics["distil/teacher_mass"],
        "overlap_count": overlap,
        "overlap_token_advantage": gap / overlap.clamp(min=1),
    }
    return outputs | {name: column * x["response_mask"] for name, column in whole.items()}


def policy_term(x: Mapping[str, Tensor], params: Params, clip: Fields) -> Tensor:
    """verl's clipped loss of `advantages` under the actor's aggregation, with rollout weights."""
    fields = {"dual_clip_c": params["clip_ratio_c"], **clip}
    info = params["global_batch_info"]
    aggregator = verl_aggregator(params["loss_agg_mode"], info, x["response_mask"].shape[1])
    loss = MANAGER.build(PolicyLoss, "ppo_clip", fields)
    objective = Objective((LossTerm(loss, aggregator),), aggregator, correction=weights_of(x))
    batch, _ = objective.correct(batch_of(x))
    prepared = on_ranks(objective.prepare(batch, torch.Generator()), info.get("dp_size", 1))
    return objective.loss(x["log_prob"], torch.zeros_like(x["log_prob"]), batch, prepared).total


def run_verl_distillation(case: Case) -> Outputs:
    """A divergence from candidates, or an estimator of the KL against the teacher, as verl's term.

    It is a term of its own, or the advantages of a policy loss with bounds of its own.
    """
    x, params = inputs_of(case), case["params"]
    leaves = [x[name].requires_grad_() for name in ("log_prob", "student_logits") if name in x]
    mask, bound = x["response_mask"], params["loss_max_clamp"]
    if params["loss_mode"] == "forward_kl_topk":
        fields: Fields = {
            "divergence": "forward",
            "support": "topk",
            "top_k": params["topk"],
            "rest": "raw",
            "log_prob_floor": params["log_prob_min_clamp"],
            "floor_at_zero": True,
        }
        found = distilled(x["student_logits"], fields, mask, **candidates(x))
        values = found.loss
        ours = {"student_mass": "student_mass", "teacher_mass": "teacher_mass"}
        ours |= {"overlap_ratio": "overlap"}
        metrics = {
            f"distillation/{peer}": found.total(f"distil/{name}") / mask.sum()
            for peer, name in ours.items()
        }
    else:
        values = verl_kl(params["loss_mode"]).kl(x["log_prob"], x["teacher_log_prob"])
        of_tokens = values.detach()[mask.bool()]
        metrics = {"distillation/abs_loss": of_tokens.abs().mean()}
        metrics |= {f"distillation/loss_{n}": getattr(of_tokens, n)() for n in ("min", "max")}
    if bound is not None:
        values = values.clamp(-bound, bound)
    if params["use_policy_gradient"]:
        term = policy_term({**x, "advantages": -values.detach()}, params, clip_fields(params))
    else:
        term = aggregate(values, mask, params["loss_agg_mode"], params["global_batch_info"])
    metrics["distillation/loss"] = term.detach()
    total = term
    if params["use_task_rewards"]:
        names = {f"clip_{side}": f"task_clip_ratio_{side}" for side in ("low", "high")}
        task = policy_term(x, params, {ours: params[peer] for ours, peer in names.items()})
        total = task + params["distillation_loss_coef"] * term
    grads = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    names_of = [f"grad_{name}" for name in ("log_prob", "student_logits") if name in x]
    return {"loss": total, "metrics": metrics, **dict(zip(names_of, grads, strict=True))}


def answer_of(labels: Tensor, *, skip_end: bool) -> slice:
    """Where a row's answer is; TRL leaves its last token out."""
    places = (labels != -100).nonzero().squeeze(1).tolist()
    return slice(places[0], places[0] + len(places) - skip_end) if places else slice(0, 0)


def ends_of(x: Mapping[str, Tensor], side: str, row: int, answer: slice) -> list[int]:
    """The byte at which each token of an answer ends; without offsets tokens are counted."""
    offsets = x.get(f"{side}_byte_offsets")
    if offsets is None:
        return list(range(1, answer.stop - answer.start + 1))
    return offsets[row, answer, 1].long().tolist()


def uld_row(loss: TextLoss[Any], x: Mapping[str, Tensor], params: Params, row: int) -> Tensor:
    """The values [G] of one response's groups.

    In `observed` TRL reads logits at the answer's own positions, which predict what comes next.
    """
    late = params["token_merge_strategy"] == "observed"
    answers = {
        side: answer_of(x[f"{side}_labels"][row], skip_end=params["skip_eos"])
        for side in ("student", "teacher")
    }
    ends = [ends_of(x, side, row, answer) for side, answer in answers.items()]
    numbers = [torch.tensor([each], dtype=torch.int64) for each in align(*ends)]
    width = numbers[0].shape[1]
    keys = whole_groups(numbers[0], torch.ones_like(numbers[0]))
    found = []
    for (side, answer), group, tau in zip(
        answers.items(), numbers, loss.temperatures(), strict=True
    ):
        shift = 0 if late else 1
        logits = x[f"{side}_logits"][row, answer.start - shift : answer.stop - shift]
        ids = x[f"{side}_ids"][row, answer].long()
        own = torch.log_softmax(logits / tau, dim=-1).gather(1, ids[:, None]).squeeze(1)
        tokens = members(group, keys, width, loss.at)
        others = products(own[tokens.other_columns], tokens.other_group, len(keys))
        found.append((logits[tokens.columns], others))
    (logits, others), (teacher, teacher_others) = found
    matched = x.get("matched_ids", torch.zeros(0, 2)).long()
    said = TeacherRows(
        torch.zeros(len(keys), dtype=torch.int64),
        teacher,
        others=others,
        teacher_others=teacher_others,
        matched=matched,
    )
    return loss.rows(logits, said).loss


def run_uld(case: Case) -> Outputs:
    x, params = inputs_of(case), case["params"]
    x["student_logits"].requires_grad_()
    fields: Fields = {
        "merge": params["token_merge_strategy"],
        "hybrid": params["use_hybrid_loss"],
        "temperature": params["student_temperature"],
        "teacher_temperature": params["teacher_temperature"],
    }
    if params["use_hybrid_loss"]:
        fields |= divergence_fields(params["beta"])
        fields |= {k: params[k] for k in ("matched_weight", "unmatched_weight")}
    loss = MANAGER.build(DistillationLoss, "uld", fields)
    assert isinstance(loss, TextLoss)
    rows = [uld_row(loss, x, params, row) for row in range(len(x["student_labels"]))]
    of_rows = pad_sequence(rows, batch_first=True)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).detach()
    value = Distilled(of_rows, mask, {}).aggregated("seq-mean-token-mean", count_empty_seqs=True)
    total = params["distillation_weight"] * value
    if params["crossentropy_weight"]:
        labels = x["student_labels"][:, 1:].long()
        logprobs = torch.log_softmax(x["student_logits"][:, :-1], dim=-1)
        own = logprobs.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
        batch = build_batch((labels != -100).double())
        nll = MANAGER.build(PolicyLoss, "ptx").token_loss(own, batch).loss
        total = total + params["crossentropy_weight"] * Distilled(nll, batch.mask, {}).aggregated(
            "token-mean"
        )
    return grad_of(total, x["student_logits"])


RUNNERS |= {
    ("distillation", "GKDTrainer.generalized_jsd_loss"): run_jsd,
    ("distillation", "GOLDTrainer.generalized_jsd_loss"): run_jsd,
    ("distillation", "IWOPDTrainer.generalized_jsd_loss"): run_jsd,
    ("distillation", "IWOPDTrainer._compute_iw_opd_loss"): run_iw_opd,
    ("distillation", "IWOPDTrainer._compute_local_sparse_top_1_divergence_loss"): run_sparse_top_1,
    ("distillation", "IWOPDTrainer._compute_server_forward_kl_loss"): run_server_forward_kl,
    ("distillation", "SDPOTrainer.compute_loss"): run_self_distillation,
    ("distillation", "SDFTTrainer.compute_loss"): run_self_distillation,
    ("distillation", "_chunked_divergence_loss"): run_chunked_divergence,
    ("distillation", "_jsd_loss_chunk"): run_jsd_chunk,
    ("distillation", "compute_forward_kl_topk"): run_verl_forward_kl,
    ("distillation", "distillation_ppo_loss"): run_verl_distillation,
    ("distillation", "ULDLoss"): run_uld,
}


def run_case(case: Case) -> Outputs:
    """What our plugins give for a recorded case: every key of its `outputs`."""
    return RUNNERS[case["kind"], case["function"]](case)
