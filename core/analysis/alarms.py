"""Alarms of an RL step: a table of what is known to go wrong, how it shows, and what to try.

`RULES` is the table and `judge` the one loop over it. A rule's name is also that of its threshold
in the section `alarms` of the config.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from posttrain.core.analysis.alarm_samples import (
    Picked,
    StepSamples,
    cut,
    equal_groups,
    least_entropy,
    longest,
    most_entropy,
    most_weight,
    paid_though_wrong,
    repeated,
    shortest,
)
from posttrain.core.config.alarms import AlarmsSection
from posttrain.core.tracking.metric_names import ALARM

Row = Mapping[str, float]
WINDOW = 3
"""Consecutive steps for which `equal_groups` must hold; evaluations that stand for now."""
MEDIAN_STEPS, LEAST_STEPS = 20, 5
FEW, MANY = 5, 20
"""Steps whose mean stands for the beginning or for now: a single step is mostly noise."""
ENTROPY_RISE = 0.5
"""Nats by which entropy must have risen: twice almost nothing is still almost nothing."""
WIDEST = 0.15
"""Half width of an interval of held-out accuracy with which `flat` can still be said."""
FLAT = 0.02
"""A change of accuracy, as a fraction, that counts as none."""
SOLVED = 0.9
"""Accuracy from which on there is little left to gain."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What rules read: the metrics of this step, and of the steps before it in order.

    `evaluations` are the rows with held-out accuracy, this step's the last one if it has any, and
    `sampled` those with pass@k of several answers.
    `kl_target` is (metric, target) of a KL controller that has a target.
    """

    now: Row
    before: Sequence[Row] = ()
    evaluations: Sequence[Row] = ()
    sampled: Sequence[Row] = ()
    kl_target: tuple[str, float] | None = None
    mismatch_limit: float = 0.02


Values = dict[str, Any]  # numbers and texts that the sentences of a rule format
Read = Callable[[Seen], Values | None]


@dataclass(frozen=True, slots=True)
class Rule:
    """One alarm.

    `read` takes its values from the steps; None means that there is nothing to judge yet. `fine` is
    the condition under which it is silent, of the values and the threshold. `what` and `advice`
    are format strings of the values and `limit`. A dashboard marks it on `curves`: metrics, or what
    their names begin with. `rows` picks the responses of a step that show it.
    """

    read: Read
    fine: Callable[[Values, float], bool]
    what: str
    advice: str
    curves: tuple[str, ...]
    rows: Callable[[StepSamples], Picked] | None = None


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
    key, rows = "eval/greedy_accuracy", seen.evaluations
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


def _last(seen: Seen, name: str, count: int, skip: int = 0) -> list[float]:
    """The metric at the last `count` steps that have it, before the `skip` newest of them."""
    rows: Iterable[Row] = (seen.now, *reversed(seen.before[-4 * (count + skip) :]))
    values = list(islice((row[name] for row in rows if name in row), count + skip))
    return values[skip:][::-1]


def _first(seen: Seen, name: str, count: int = FEW) -> list[float]:
    """The metric at the first `count` steps that have it, none of them among the newest FEW."""
    rows = seen.before[: max(0, len(seen.before) + 1 - FEW)]
    return list(islice((row[name] for row in rows if name in row), count))


def _learns(seen: Seen, count: int) -> bool:
    """Whether the mean reward of `count` steps is above that of as many before, beyond noise.

    Beyond the standard error of the difference, as the steps scatter; False where there are fewer.
    """
    was, now = (_last(seen, "reward/mean", count, skip) for skip in (count, 0))
    if len(was) < count or len(now) < count:
        return False
    error = math.sqrt((statistics.variance(was) + statistics.variance(now)) / count)
    return statistics.fmean(now) - statistics.fmean(was) > error


def _solved(seen: Seen, count: int) -> bool:
    """Whether there is little left to gain: of answers, or of groups, most are right."""
    accuracy = _last(seen, "acc/mean", count)
    groups = _last(seen, "group/all_correct_frac", count)
    right = bool(accuracy) and statistics.fmean(accuracy) >= SOLVED
    return right or (bool(groups) and statistics.fmean(groups) > 0.5)


def _ends(seen: Seen, name: str) -> tuple[float, float] | None:
    """Mean of the metric over the first FEW steps, and over the last; None before there are."""
    first, last = _first(seen, name), _last(seen, name, FEW)
    if len(first) < FEW or len(last) < FEW or name not in seen.now:
        return None
    return statistics.fmean(first), statistics.fmean(last)


def _entropy_since_first(seen: Seen) -> Values | None:
    """Entropy now and at first; `fine` while the stage learns, or has solved its problems."""
    values = _since_first("entropy/mean")(seen)
    fine = _learns(seen, FEW) or _solved(seen, FEW)
    return values and values | {"fine": fine}


def _entropy_ends(seen: Seen) -> Values | None:
    ends = _ends(seen, "entropy/mean")
    return ends and {"first": ends[0], "now": ends[1]}


def _lengths_and_reward(seen: Seen) -> Values | None:
    """Length and reward of the last steps, of as many before them, and the length at first."""
    first = _first(seen, "resp_len/mean")
    was, now = (_last(seen, "resp_len/mean", MANY, skip) for skip in (MANY, 0))
    reward = _last(seen, "reward/mean", MANY)
    if len(first) < FEW or len(was) < MANY or len(reward) < MANY:
        return None
    return {
        "first": statistics.fmean(first),
        "was": statistics.fmean(was),
        "now": statistics.fmean(now),
        "reward": statistics.fmean(reward),
        "learning": _learns(seen, MANY),
        "solved": _solved(seen, MANY),
    }


def _stalled(values: Values, limit: float) -> bool:
    """Whether length grew to `limit` times the first, and neither it nor the reward still does."""
    grew = values["was"] >= limit * values["first"] > 0
    stopped = values["now"] <= (1 + FLAT) * values["was"]
    return grew and stopped and not values["learning"] and not values["solved"]


def _length_reward_accuracy(seen: Seen) -> Values | None:
    """Length, reward and accuracy, at first and now; `followed` if accuracy rose with reward."""
    found = [_ends(seen, name) for name in ("resp_len/mean", "reward/mean", "acc/mean")]
    if None in found:
        return None
    (first, now), (reward_first, reward), (accuracy_first, accuracy) = found  # type: ignore[misc]
    held_out = _held_out_rise(seen)
    followed = accuracy - accuracy_first > FLAT and (held_out is None or held_out > FLAT)
    return {
        "first": first,
        "now": now,
        "reward_first": reward_first,
        "reward": reward,
        "accuracy_first": accuracy_first,
        "accuracy": accuracy,
        "followed": followed or accuracy >= SOLVED,
    }


def _held_out_rise(seen: Seen) -> float | None:
    """Held-out accuracy now less at first; None where the interval is too wide to say."""
    key, rows = "eval/greedy_accuracy", seen.evaluations
    if len(rows) < 2 or _half(rows[0]) > WIDEST:
        return None
    return float(rows[-1][key] - rows[0][key])


def _half(row: Row) -> float:
    """Half the width of the interval of a held-out accuracy; all there is if it has none."""
    return (row.get("eval/greedy_high", 1.0) - row.get("eval/greedy_low", 0.0)) / 2


def _reward_and_flat(seen: Seen) -> Values | None:
    """How far the reward has risen, and whether held-out accuracy is where it was."""
    key, rows, least = "eval/greedy_accuracy", seen.evaluations, 1 + WINDOW
    ends, spread = _ends(seen, "reward/mean"), _first(seen, "reward/std")
    if ends is None or not spread or len(rows) < least or rows[-1]["step"] != seen.now.get("step"):
        return None
    if _half(rows[0]) > WIDEST:
        return None
    accuracy = statistics.fmean(row[key] for row in rows[-WINDOW:])
    deviation = statistics.fmean(spread)
    return {
        "reward_first": ends[0],
        "reward": ends[1],
        "rise": (ends[1] - ends[0]) / deviation if deviation > 0 else 0.0,
        "accuracy_first": rows[0][key],
        "accuracy": accuracy,
        "flat": accuracy - rows[0][key] <= FLAT and accuracy < SOLVED,
    }


def _without_signal(seen: Seen) -> Values | None:
    """The share of groups whose rewards are all equal, at first and now, and what they are."""
    shares = _last(seen, "group/zero_adv_frac", 2 * FEW)
    first = _first(seen, "group/zero_adv_frac")
    if len(shares) < 2 * FEW or len(first) < FEW or "group/zero_adv_frac" not in seen.now:
        return None
    found = {"now": statistics.fmean(shares), "first": statistics.fmean(first)}
    for name in ("all_correct", "all_wrong"):
        values = _last(seen, f"group/{name}_frac", 2 * FEW)
        found[name] = statistics.fmean(values) if values else 0.0
    easy = found["all_correct"] >= found["all_wrong"]
    advice = (
        "choose harder problems, or the sampler 'curriculum'"
        if easy
        else "choose easier problems, more responses (num_generations), or a stage sft before it"
    )
    return {**found, "solved": _solved(seen, 2 * FEW), "advice": advice}


def _average_and_pass(seen: Seen) -> Values | None:
    """avg@k and pass@k of the first two evaluations with sampled answers, and of the last three."""
    rows = seen.sampled
    if len(rows) < 2 + WINDOW or rows[-1]["step"] != seen.now.get("step"):
        return None
    sizes = [int(name.rpartition("/")[2]) for name in rows[-1] if name.startswith("eval/pass_at/")]
    k = max(sizes, default=0)
    if not k or any(f"eval/{name}_at/{k}" not in row for row in rows for name in ("avg", "pass")):
        return None

    def mean(name: str, part: Sequence[Row]) -> float:
        return statistics.fmean(row[f"eval/{name}_at/{k}"] for row in part)

    return {
        "k": k,
        "average_first": mean("avg", rows[:2]),
        "average": mean("avg", rows[-WINDOW:]),
        "pass_first": mean("pass", rows[:2]),
        "passed": mean("pass", rows[-WINDOW:]),
    }


def _diverse(values: Values, limit: float) -> bool:
    """Whether avg@k has not risen by `limit`, or pass@k with it, or there is nothing to lose."""
    if values["average"] - values["average_first"] < limit:
        return True
    solved = min(values["passed"], values["pass_first"]) >= 0.95
    return bool(solved or values["passed"] > values["pass_first"])


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
    """The share of repeated responses, and of these the least that are wrong."""
    values = _metric("sampling/duplicate_frac")(seen)
    right = seen.now.get("acc/mean", 0.0)  # right answers to one problem are often the same
    solved = seen.now.get("group/all_correct_frac", 0.0) > 0.5
    return values and values | {"wrong": values["now"] - right, "solved": solved}


RULES: Mapping[str, Rule] = {
    "mismatch": Rule(
        _metric("mismatch/k3"),
        lambda v, limit: v["now"] <= limit,
        "engine and trainer disagree on the sampled tokens, mismatch/k3 {now:.4f} > "
        "mismatch_alarm {limit} nats",
        "check that sync/probe_abs_mean is small (if not, the cause is the weights or the "
        "precision), that staleness/max is 0, and that the engine samples as `generation` says; "
        "set rollout_correction.plugin to bound the effect",
        curves=("mismatch/k3",),
        rows=longest,
    ),
    "entropy_collapse": Rule(
        _entropy_since_first,
        lambda v, limit: v["now"] >= limit * v["first"] or v["fine"],
        "entropy/mean is {now:.3g} nats and was {first:.3g} at the first step, and reward/mean "
        "does not rise: the policy has stopped exploring, and equal responses give no gradient",
        "raise entropy_coef, clip higher (policy_loss.clip_high 0.28, as DAPO), lower "
        "optimizer.learning_rate, or add a KL term",
        curves=("entropy/mean",),
        rows=least_entropy,
    ),
    "entropy_rise": Rule(
        _entropy_ends,
        lambda v, limit: v["now"] < limit * v["first"] or v["now"] - v["first"] < ENTROPY_RISE,
        f"entropy/mean is {{now:.3g}} nats over the last {FEW} steps and was {{first:.3g}} over "
        "the first: responses become random, as garbled text is",
        "read responses before anything else; lower optimizer.learning_rate, entropy_coef or "
        "generation.temperature, or add a KL term",
        curves=("entropy/mean",),
        rows=most_entropy,
    ),
    "truncated": Rule(
        _metric("resp_len/truncated_frac"),
        lambda v, limit: v["now"] <= limit,
        "{now:.0%} of responses were cut at the length limit, so what is judged are "
        "unfinished answers",
        "raise generation.max_response_length, leave them out (overlong_filter: mask), or punish "
        "length softly (the reward soft_overlong)",
        curves=("resp_len/truncated_frac",),
        rows=cut,
    ),
    "length_explosion": Rule(
        _since_first("resp_len/mean"),
        lambda v, limit: v["now"] <= limit * v["first"] or v["first"] == 0,
        "resp_len/mean is {now:.0f} tokens and was {first:.0f} at the first step",
        "check whether the reward or the aggregator pays for length (posttrain forensics); "
        "token-mean and dr_grpo do not favour long wrong answers as seq-mean-token-mean does, and "
        "the reward soft_overlong punishes length",
        curves=("resp_len/mean",),
        rows=longest,
    ),
    "length_stalled": Rule(
        _lengths_and_reward,
        lambda v, limit: not _stalled(v, limit),
        f"resp_len/mean grew from {{first:.0f}} to {{was:.0f}} tokens and has stopped at "
        f"{{now:.0f}}, and reward/mean at {{reward:.3g}}, for {MANY} steps",
        "if resp_len/truncated_frac grows, raise generation.max_response_length; if groups have "
        "equal rewards, choose other problems; else the policy may have learned what it can here",
        curves=("resp_len/mean", "reward/mean"),
        rows=longest,
    ),
    "length_shrinks": Rule(
        _length_reward_accuracy,
        lambda v, limit: (
            v["now"] > limit * v["first"] or v["reward"] <= v["reward_first"] or v["followed"]
        ),
        "resp_len/mean fell from {first:.0f} to {now:.0f} tokens and reward/mean rose from "
        "{reward_first:.3g} to {reward:.3g}, while accuracy did not follow (training "
        "{accuracy_first:.1%} to {accuracy:.1%}): short answers are paid without being right",
        "read the shortest responses; give accuracy more weight, or lower what pays for form or "
        "brevity",
        curves=("resp_len/mean", "reward/mean"),
        rows=shortest,
    ),
    "held_out_flat": Rule(
        _reward_and_flat,
        lambda v, limit: not v["flat"] or v["rise"] <= limit,
        "reward/mean rose from {reward_first:.3g} to {reward:.3g}, {rise:.1f} standard deviations "
        "of a response's reward, while held-out accuracy is {accuracy:.1%} and was "
        "{accuracy_first:.1%} at first",
        "compare responses with the most reward to held-out answers: the reward may pay for "
        "something else, or the training problems are learned by heart (more of them, fewer "
        "epochs)",
        curves=("reward/mean", "eval/greedy_accuracy"),
        rows=paid_though_wrong,
    ),
    "overoptimised": Rule(
        _accuracy_and_reward,
        lambda v, _: not v["fell"] or v["reward"] <= v["reward_then"],
        "reward/mean rose from {reward_then:.3g} to {reward:.3g} while held-out accuracy fell from "
        "{best:.1%} (step {best_step:.0f}) to {accuracy:.1%}: the policy has found what the reward "
        "pays for instead of what is asked",
        "read samples (posttrain inspect, posttrain forensics), add a KL term, or give accuracy "
        "more weight",
        curves=("reward/mean", "eval/greedy_accuracy"),
        rows=paid_though_wrong,
    ),
    "equal_groups": Rule(
        _equal_shares,
        lambda v, limit: v["share"] < limit,
        f"in each of the last {WINDOW} steps at least {{share:.0%}} of groups had equal rewards "
        "and gave no gradient",
        "{advice}; the sampler 'dynamic' draws until groups differ",
        curves=("group/zero_adv_frac",),
        rows=equal_groups,
    ),
    "signal_fades": Rule(
        _without_signal,
        lambda v, limit: v["now"] < limit or v["now"] <= v["first"] or v["solved"],
        f"over the last {2 * FEW} steps {{now:.0%}} of groups had equal rewards and gave no "
        "gradient, {first:.0%} at first; {all_correct:.0%} are all right, {all_wrong:.0%} all "
        "wrong",
        "{advice}; the sampler 'dynamic' draws until groups differ",
        curves=("group/zero_adv_frac",),
        rows=equal_groups,
    ),
    "diversity_lost": Rule(
        _average_and_pass,
        _diverse,
        "avg@{k} rose from {average_first:.1%} to {average:.1%} while pass@{k} went from "
        "{pass_first:.1%} to {passed:.1%}: the policy is surer of what it could solve, and solves "
        "nothing more",
        "raise policy_loss.clip_high or entropy_coef, add a KL term, take harder problems, or "
        "learn from pass@k (the advantage 'pass_at_k'); stop here if one answer is all that is "
        "asked",
        curves=("eval/pass_at/",),
    ),
    "clip_high": Rule(
        _metric("clip/high_frac"),
        lambda v, limit: v["now"] <= limit,
        "{now:.0%} of tokens are cut at the upper clip bound and give no gradient",
        "lower optimizer.learning_rate, take fewer updates of a batch (epochs, num_mini_batches), "
        "or raise policy_loss.clip_high",
        curves=("clip/high_frac",),
        rows=most_weight,
    ),
    "policy_kl": Rule(
        _metric("kl/old_k3"),
        lambda v, limit: v["now"] <= limit,
        "one batch moved the policy by kl/old_k3 {now:.3g} nats per token",
        "lower optimizer.learning_rate, take fewer updates of a batch, or set kl_guard",
        curves=("kl/old_k3",),
        rows=most_weight,
    ),
    "kl_target": Rule(
        _kl_and_target,
        lambda v, limit: v["now"] <= limit * v["target"],
        "{name} is {now:.3g} nats, {times:.1f} times the controller's target {target:g}",
        "raise its first coefficient, let it follow faster, or lower optimizer.learning_rate",
        curves=("kl/ref_k3",),
        rows=most_weight,
    ),
    "grad_spike": Rule(
        _norm_and_median,
        lambda v, limit: v["now"] <= limit * v["median"] or v["median"] == 0,
        "grad/norm is {now:.3g}, {times:.0f} times the median {median:.3g} of the last {steps} "
        "steps",
        "look at the step's samples and largest weights (posttrain inspect --step); max_grad_norm "
        "bounds what one batch can do, rollout_correction what a wrong log-prob can",
        curves=("grad/norm",),
        rows=most_weight,
    ),
    "duplicates": Rule(
        _duplicates,
        lambda v, limit: v["wrong"] <= limit or v["solved"],
        "{now:.0%} of responses repeat another one of their group, more than are right",
        "raise generation.temperature, check top_p and top_k, or add entropy (entropy_coef)",
        curves=("sampling/duplicate_frac",),
        rows=repeated,
    ),
    "ess_seq": Rule(
        _metric("ess/seq"),
        lambda v, limit: v["now"] >= limit,
        "ess/seq is {now:.2f}: a few responses carry most of the importance weight",
        "lower max_staleness, or bound weights with rollout_correction",
        curves=("ess/seq",),
        rows=longest,
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


@dataclass(frozen=True, slots=True)
class Raised:
    """An alarm of a stage: the steps at which it went off, and what it said at the first."""

    name: str
    steps: tuple[int, ...]
    text: str


def raised_in(
    history: Sequence[Row],
    limits: AlarmsSection,
    kl_target: tuple[str, float] | None = None,
    mismatch_limit: float = 0.02,
) -> list[Raised]:
    """The alarms that a stage's metrics recorded, by the first step; texts are made again."""
    places: dict[str, list[int]] = {}
    for place, row in enumerate(history):
        for name in row:
            if name.startswith(ALARM) and row[name]:
                places.setdefault(name.removeprefix(ALARM), []).append(place)
    found = []
    for name, at in places.items():
        before = history[: at[0] + 1]
        seen = Seen(
            history[at[0]],
            before[:-1],
            [row for row in before if "eval/greedy_accuracy" in row],
            [row for row in before if "eval/sampled_problems" in row],
            kl_target,
            mismatch_limit,
        )
        text = judge(seen, limits).get(name, "") if name in RULES else ""
        found.append(Raised(name, tuple(int(history[i]["step"]) for i in at), text))
    return found


# --- where to look -------------------------------------------------------------------------------

EVALUATED = ("overoptimised", "held_out_flat", "length_shrinks")
"""Alarms that compare with held-out answers."""


def with_samples(alarm: Raised, microscope: str = "") -> Raised:
    """The alarm with where to look, where the step's samples are not at hand: no rows."""
    shown = look_at(alarm.name, StepSamples(alarm.steps[0]), microscope)
    return replace(alarm, text=f"{alarm.text}. Look at {shown}")


def look_at(name: str, samples: StepSamples, microscope: str = "") -> str:
    """Where to see what the alarm is about: "rows 3 and 7 of tables/...; posttrain inspect ...".

    `microscope` is the command that opens the step token by token, empty where nothing was kept.
    Tables are among the artifacts of the stage's MLflow run.
    """
    step = f"step-{samples.step:06d}.json"
    if name == "diversity_lost":  # about other answers than the step's own
        folder = "tables/held_out_sampled"
        return f"{folder}/{step} against step-000000.json (columns right, different)"
    pick = RULES[name].rows if name in RULES else None
    what, rows = ("", []) if pick is None else pick(samples)
    table, numbers = f"tables/samples/{step}", ", ".join(map(str, rows))
    places = [f"rows {numbers} of {table} ({what})" if rows else table]
    if name in EVALUATED:
        places.append(f"tables/held_out/{step}")
    return "; ".join([*places, microscope] if microscope else places)
