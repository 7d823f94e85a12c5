"""Alarms of an RL step: a table of what is known to go wrong, how it shows, and what to try.

`RULES` is the table and `judge` the one loop over it. A rule's name is also that of its threshold
in the section `alarms` of the config.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.core.config.sections import AlarmsSection

Row = Mapping[str, float]
WINDOW = 3
"""Consecutive steps for which `equal_groups` must hold."""
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


Values = dict[str, Any]  # numbers and texts that the sentences of a rule format
Read = Callable[[Seen], Values | None]


@dataclass(frozen=True, slots=True)
class Rule:
    """One alarm.

    `read` takes its values from the steps; None means that there is nothing to judge yet. `fine` is
    the condition under which it is silent, of the values and the threshold. `what` and `advice`
    are format strings of the values and `limit`.
    """

    read: Read
    fine: Callable[[Values, float], bool]
    what: str
    advice: str


def _metric(name: str) -> Read:
    """`now`: the metric at this step."""
    return lambda seen: {"now": seen.now[name]} if name in seen.now else None


def _since_first(name: str) -> Read:
    """`now` and `first`: the metric at this step, and at the first step that had it."""

    def read(seen: Seen) -> Values | None:
        first = next((row[name] for row in seen.before if name in row), None)
        if first is None or name not in seen.now:
            return None
        return {"now": seen.now[name], "first": first}

    return read


def _accuracy_and_reward(seen: Seen) -> Values | None:
    """Held-out accuracy now and at its best, and the mean reward at both times."""
    key = "eval/greedy_accuracy"
    rows = [row for row in seen.evaluations if key in row]
    if len(rows) < 2 or rows[-1]["step"] != seen.now.get("step"):
        return None
    best, now = max(rows[:-1], key=lambda row: row[key]), rows[-1]
    then = next((r for r in seen.before if r["step"] >= best["step"] and "reward/mean" in r), None)
    if then is None or "reward/mean" not in seen.now:
        return None
    return {
        "fell": now.get("eval/greedy_high", now[key]) < best.get("eval/greedy_low", best[key]),
        "accuracy": now[key],
        "best": best[key],
        "best_step": best["step"],
        "reward": seen.now["reward/mean"],
        "reward_then": then["reward/mean"],
    }


def _equal_shares(seen: Seen) -> Values | None:
    """The least share of equal groups in the last steps, and what to try against its cause."""
    rows = [*seen.before, seen.now]
    shares = [r["group/zero_adv_frac"] for r in rows if "group/zero_adv_frac" in r][-WINDOW:]
    if len(shares) < WINDOW:
        return None
    solved = seen.now.get("group/all_correct_frac", 0.0) > 0.5
    advice = (
        "the problems are solved: choose harder ones, or stop"
        if solved
        else "choose easier problems, more responses (num_generations), a higher "
        "generation.temperature, or start from a model that is sometimes right (a stage sft)"
    )
    return {"share": min(shares), "advice": advice}


def _kl_and_target(seen: Seen) -> Values | None:
    if seen.kl_target is None or seen.kl_target[0] not in seen.now:
        return None
    name, target = seen.kl_target
    now = seen.now[name]
    return {"name": name, "now": now, "target": target, "times": now / target}


def _norm_and_median(seen: Seen) -> Values | None:
    norms = [row["grad/norm"] for row in seen.before if "grad/norm" in row][-MEDIAN_STEPS:]
    if "grad/norm" not in seen.now or len(norms) < LEAST_STEPS:
        return None
    now, median = seen.now["grad/norm"], statistics.median(norms)
    return {"now": now, "median": median, "steps": len(norms), "times": now / (median or 1.0)}


def _duplicates(seen: Seen) -> Values | None:
    values = _metric("sampling/duplicate_frac")(seen)
    return values and values | {"solved": seen.now.get("group/all_correct_frac", 0.0) > 0.5}


RULES: Mapping[str, Rule] = {
    "mismatch": Rule(
        _metric("mismatch/k3"),
        lambda v, limit: v["now"] <= limit,
        "engine and trainer disagree on the sampled tokens, mismatch/k3 {now:.4f} > "
        "mismatch_alarm {limit} nats",
        "check that sync/probe_abs_mean is small (if not, the cause is the weights or the "
        "precision), that staleness/max is 0, and that the engine samples as `generation` says; "
        "set rollout_correction.plugin to bound the effect",
    ),
    "entropy_collapse": Rule(
        _since_first("entropy/mean"),
        lambda v, limit: v["now"] >= limit * v["first"],
        "entropy/mean is {now:.3g} nats and was {first:.3g} at the first step: the policy has "
        "stopped exploring, and equal responses give no gradient",
        "raise entropy_coef, clip higher (policy_loss.clip_high 0.28, as DAPO), lower "
        "optimizer.learning_rate, or add a KL term",
    ),
    "truncated": Rule(
        _metric("resp_len/truncated_frac"),
        lambda v, limit: v["now"] <= limit,
        "{now:.0%} of responses were cut at the length limit, so what is judged are "
        "unfinished answers",
        "raise generation.max_response_length, leave them out (overlong_filter: mask), or punish "
        "length softly (the reward soft_overlong)",
    ),
    "length_explosion": Rule(
        _since_first("resp_len/mean"),
        lambda v, limit: v["now"] <= limit * v["first"] or v["first"] == 0,
        "resp_len/mean is {now:.0f} tokens and was {first:.0f} at the first step",
        "check whether the reward or the aggregator pays for length (posttrain forensics); "
        "token-mean and dr_grpo do not favour long wrong answers as seq-mean-token-mean does, and "
        "the reward soft_overlong punishes length",
    ),
    "overoptimised": Rule(
        _accuracy_and_reward,
        lambda v, _: not v["fell"] or v["reward"] <= v["reward_then"],
        "reward/mean rose from {reward_then:.3g} to {reward:.3g} while held-out accuracy fell from "
        "{best:.1%} (step {best_step:.0f}) to {accuracy:.1%}: the policy has found what the reward "
        "pays for instead of what is asked",
        "read samples (posttrain inspect, posttrain forensics), add a KL term, or give accuracy "
        "more weight",
    ),
    "equal_groups": Rule(
        _equal_shares,
        lambda v, limit: v["share"] < limit,
        f"in each of the last {WINDOW} steps at least {{share:.0%}} of groups had equal rewards "
        "and gave no gradient",
        "{advice}; the sampler 'dynamic' draws until groups differ",
    ),
    "clip_high": Rule(
        _metric("clip/high_frac"),
        lambda v, limit: v["now"] <= limit,
        "{now:.0%} of tokens are cut at the upper clip bound and give no gradient",
        "lower optimizer.learning_rate, take fewer updates of a batch (epochs, num_mini_batches), "
        "or raise policy_loss.clip_high",
    ),
    "policy_kl": Rule(
        _metric("kl/old_k3"),
        lambda v, limit: v["now"] <= limit,
        "one batch moved the policy by kl/old_k3 {now:.3g} nats per token",
        "lower optimizer.learning_rate, take fewer updates of a batch, or set kl_guard",
    ),
    "kl_target": Rule(
        _kl_and_target,
        lambda v, limit: v["now"] <= limit * v["target"],
        "{name} is {now:.3g} nats, {times:.1f} times the controller's target {target:g}",
        "raise its first coefficient, let it follow faster, or lower optimizer.learning_rate",
    ),
    "grad_spike": Rule(
        _norm_and_median,
        lambda v, limit: v["now"] <= limit * v["median"] or v["median"] == 0,
        "grad/norm is {now:.3g}, {times:.0f} times the median {median:.3g} of the last {steps} "
        "steps",
        "look at the step's samples and largest weights (posttrain inspect --step); max_grad_norm "
        "bounds what one batch can do, rollout_correction what a wrong log-prob can",
    ),
    "duplicates": Rule(
        _duplicates,
        lambda v, limit: v["now"] <= limit or v["solved"],
        "{now:.0%} of responses repeat another one of their group",
        "raise generation.temperature, check top_p and top_k, or add entropy (entropy_coef)",
    ),
    "ess_seq": Rule(
        _metric("ess/seq"),
        lambda v, limit: v["now"] >= limit,
        "ess/seq is {now:.2f}: a few responses carry most of the importance weight",
        "lower max_staleness, or bound weights with rollout_correction",
    ),
}


def judge(seen: Seen, limits: AlarmsSection) -> dict[str, str]:
    """The text of each alarm that could be judged, empty where all is well."""
    found = {}
    for name, rule in RULES.items():
        # The threshold of `mismatch` is the stage's own; None and False turn an alarm off.
        limit = seen.mismatch_limit if name == "mismatch" else getattr(limits, name)
        values = None if limit is None or limit is False else rule.read(seen)
        if values is not None:
            text = f"{rule.what}: {rule.advice}".format(limit=limit, **values)
            found[name] = "" if rule.fine(values, limit) else text
    return found
