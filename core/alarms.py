"""Alarms of an RL step: what was measured, against what is known to go wrong, and what to do.

Each rule is a function of the steps so far. It answers None where it has nothing to go by (its
metric was not measured, or there are too few steps), an empty text where all is well, and else what
is wrong and what to do about it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from posttrain.core.config.alarm_section import AlarmsSection

Row = Mapping[str, float]
WINDOW = 3
"""Steps that groups must be equal in, one after another."""
MEDIAN_STEPS, LEAST_STEPS = 20, 5


@dataclass(frozen=True, slots=True)
class Seen:
    """What rules read: the metrics of this step, and of the steps before it in order.

    `evaluations` are the rows with held-out accuracy, this step's the last one if it has any.
    `kl_target` is (metric, target) of a KL controller that has a target.
    """

    now: Row
    before: Sequence[Row] = ()
    evaluations: Sequence[Row] = ()
    kl_target: tuple[str, float] | None = None
    mismatch_limit: float = 0.02

    def first(self, name: str) -> float | None:
        """The metric at the first step that has it; None before this step."""
        return next((row[name] for row in self.before if name in row), None)


Rule = Callable[[Seen, AlarmsSection], str | None]


def _entropy_collapse(seen: Seen, limits: AlarmsSection) -> str | None:
    first, now = seen.first("entropy/mean"), seen.now.get("entropy/mean")
    if limits.entropy_collapse is None or first is None or now is None:
        return None
    if now >= limits.entropy_collapse * first:
        return ""
    return (
        f"entropy/mean is {now:.3g} nats and was {first:.3g} at the first step: the policy has "
        "stopped exploring, and equal responses teach nothing; raise entropy_coef, clip higher "
        "(policy_loss.clip_high 0.28, as DAPO), lower optimizer.learning_rate, or add a KL term"
    )


def _truncated(seen: Seen, limits: AlarmsSection) -> str | None:
    now = seen.now.get("resp_len/truncated_frac")
    if limits.truncated is None or now is None:
        return None
    if now <= limits.truncated:
        return ""
    return (
        f"{now:.0%} of responses were cut at the length limit: their rewards are of unfinished "
        "answers; raise generation.max_response_length, leave them out (overlong_filter: mask), or "
        "punish length softly (the reward soft_overlong)"
    )


def _length_explosion(seen: Seen, limits: AlarmsSection) -> str | None:
    first, now = seen.first("resp_len/mean"), seen.now.get("resp_len/mean")
    if limits.length_explosion is None or not first or now is None:
        return None
    if now <= limits.length_explosion * first:
        return ""
    return (
        f"resp_len/mean is {now:.0f} tokens and was {first:.0f} at the first step: look whether "
        "reward or aggregation pays for length (posttrain forensics); token-mean and dr_grpo do "
        "not favour long wrong answers as seq-mean-token-mean does, soft_overlong punishes length"
    )


def _overoptimised(seen: Seen, limits: AlarmsSection) -> str | None:
    key = "eval/greedy_accuracy"
    rows = [row for row in seen.evaluations if key in row]
    if not limits.overoptimised or len(rows) < 2 or rows[-1]["step"] != seen.now.get("step"):
        return None
    best, now = max(rows[:-1], key=lambda row: row[key]), rows[-1]
    then = next((r for r in seen.before if r["step"] >= best["step"] and "reward/mean" in r), None)
    if then is None or "reward/mean" not in seen.now:
        return None
    fallen = now.get("eval/greedy_high", now[key]) < best.get("eval/greedy_low", best[key])
    if not fallen or seen.now["reward/mean"] <= then["reward/mean"]:
        return ""
    return (
        f"reward/mean rose from {then['reward/mean']:.3g} to {seen.now['reward/mean']:.3g} while "
        f"held-out accuracy fell from {best[key]:.1%} (step {best['step']:.0f}) to {now[key]:.1%}: "
        "the policy has found what the reward pays for instead of what is asked; read samples "
        "(posttrain inspect, posttrain forensics), add a KL term, or weigh accuracy more"
    )


def _equal_groups(seen: Seen, limits: AlarmsSection) -> str | None:
    rows = [*seen.before, seen.now]
    shares = [r["group/zero_adv_frac"] for r in rows if "group/zero_adv_frac" in r][-WINDOW:]
    if limits.equal_groups is None or len(shares) < WINDOW:
        return None
    if min(shares) < limits.equal_groups:
        return ""
    solved = seen.now.get("group/all_correct_frac", 0.0) > 0.5
    mend = (
        "the problems are solved: choose harder ones, or stop"
        if solved
        else "choose easier problems, more responses (num_generations), a higher "
        "generation.temperature, or start from a model that is right now and then (a stage sft)"
    )
    return (
        f"in each of the last {WINDOW} steps at least {min(shares):.0%} of groups had equal "
        f"rewards and taught nothing: {mend}; the sampler 'dynamic' draws until groups differ"
    )


def _clip_high(seen: Seen, limits: AlarmsSection) -> str | None:
    now = seen.now.get("clip/high_frac")
    if limits.clip_high is None or now is None:
        return None
    if now <= limits.clip_high:
        return ""
    return (
        f"{now:.0%} of tokens are cut at the upper clip bound and teach nothing: lower "
        "optimizer.learning_rate, take fewer updates of a batch (epochs, num_mini_batches), or "
        "raise policy_loss.clip_high"
    )


def _policy_kl(seen: Seen, limits: AlarmsSection) -> str | None:
    now = seen.now.get("kl/old_k3")
    if limits.policy_kl is None or now is None:
        return None
    if now <= limits.policy_kl:
        return ""
    return (
        f"one batch moved the policy by kl/old_k3 {now:.3g} nats per token: lower "
        "optimizer.learning_rate, take fewer updates of a batch, or set kl_guard"
    )


def _kl_target(seen: Seen, limits: AlarmsSection) -> str | None:
    if limits.kl_target is None or seen.kl_target is None:
        return None
    name, target = seen.kl_target
    now = seen.now.get(name)
    if now is None:
        return None
    if now <= limits.kl_target * target:
        return ""
    return (
        f"{name} is {now:.3g} nats, {now / target:.1f} times the controller's target {target:g}: "
        "raise its first coefficient, let it follow faster, or lower optimizer.learning_rate"
    )


def _grad_spike(seen: Seen, limits: AlarmsSection) -> str | None:
    norms = [row["grad/norm"] for row in seen.before if "grad/norm" in row][-MEDIAN_STEPS:]
    now = seen.now.get("grad/norm")
    if limits.grad_spike is None or now is None or len(norms) < LEAST_STEPS:
        return None
    median = statistics.median(norms)
    if now <= limits.grad_spike * median or median == 0:
        return ""
    return (
        f"grad/norm is {now:.3g}, {now / median:.0f} times the median {median:.3g} of the last "
        f"{len(norms)} steps: look at the step's samples and largest weights (posttrain inspect "
        "--step); max_grad_norm bounds what one batch can do, rollout_correction what a wrong "
        "log-prob can"
    )


def _duplicates(seen: Seen, limits: AlarmsSection) -> str | None:
    now = seen.now.get("sampling/duplicate_frac")
    if limits.duplicates is None or now is None:
        return None
    if now <= limits.duplicates or seen.now.get("group/all_correct_frac", 0.0) > 0.5:
        return ""
    return (
        f"{now:.0%} of responses repeat another one of their group: raise generation.temperature, "
        "check top_p and top_k, or add entropy (entropy_coef)"
    )


def _ess_seq(seen: Seen, limits: AlarmsSection) -> str | None:
    now = seen.now.get("ess/seq")
    if limits.ess_seq is None or now is None:
        return None
    if now >= limits.ess_seq:
        return ""
    return (
        f"ess/seq is {now:.2f}: a few responses carry most importance weight; lower max_staleness, "
        "or bound weights with rollout_correction"
    )


def _mismatch(seen: Seen, limits: AlarmsSection) -> str | None:
    now = seen.now.get("mismatch/k3")
    if now is None:
        return None
    if now <= seen.mismatch_limit:
        return ""
    return (
        f"engine and trainer disagree on the sampled tokens, mismatch/k3 {now:.4f} > "
        f"mismatch_alarm {seen.mismatch_limit} nats: see whether sync/probe_abs_mean is small (if "
        "not, it is the weights or the precision), staleness/max is 0, and the engine samples as "
        "`generation` says; set rollout_correction.plugin to bound its effect"
    )


RULES: Mapping[str, Rule] = {
    "mismatch": _mismatch,
    "entropy_collapse": _entropy_collapse,
    "truncated": _truncated,
    "length_explosion": _length_explosion,
    "overoptimised": _overoptimised,
    "equal_groups": _equal_groups,
    "clip_high": _clip_high,
    "policy_kl": _policy_kl,
    "kl_target": _kl_target,
    "grad_spike": _grad_spike,
    "duplicates": _duplicates,
    "ess_seq": _ess_seq,
}


def judge(seen: Seen, limits: AlarmsSection) -> dict[str, str]:
    """Of each alarm that could be judged its text, empty where all is well."""
    found = {name: rule(seen, limits) for name, rule in RULES.items()}
    return {name: text for name, text in found.items() if text is not None}
