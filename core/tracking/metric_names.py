"""Every metric key with its unit, its meaning and which direction is better.

Keys are `group/quantity`. A key that is not in `METRICS` and starts with no prefix of `PREFIXES` is
refused by the tracker: a misspelt key would otherwise become a chart that nobody looks at.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from posttrain.core.errors import RunError, nearest

Better = Literal["higher", "lower"] | None


@dataclass(frozen=True, slots=True)
class Metric:
    """Unit, meaning and the better direction (None = neither is better as such) of one key."""

    unit: str
    description: str
    better: Better = None


METRICS: dict[str, Metric] = {
    # reward and accuracy of one rollout batch
    "reward/mean": Metric("reward", "mean reward of the scored responses", "higher"),
    "reward/std": Metric("reward", "standard deviation of the reward over responses"),
    "reward/min": Metric("reward", "smallest reward of the batch"),
    "reward/max": Metric("reward", "largest reward of the batch"),
    "reward/unscored_frac": Metric("fraction", "responses that could not be scored", "lower"),
    "acc/mean": Metric("fraction", "verifier's verdict before any shaping, sampled", "higher"),
    "group/zero_adv_frac": Metric("fraction", "groups whose advantages are all 0", "lower"),
    "group/all_correct_frac": Metric("fraction", "groups with only correct responses"),
    "group/all_wrong_frac": Metric("fraction", "groups with only wrong responses", "lower"),
    # advantages
    "adv/mean": Metric("advantage", "mean advantage over tokens that take loss"),
    "adv/std": Metric("advantage", "standard deviation of the advantage over those tokens"),
    "adv/max_abs": Metric("advantage", "largest absolute advantage"),
    "adv/singleton_groups": Metric("count", "groups with one scored response only", "lower"),
    "adv/pos_frac": Metric("fraction", "tokens with a positive advantage"),
    # the policy update
    "ratio/mean": Metric("ratio", "new over old probability of the sampled tokens, mean"),
    "ratio/max": Metric("ratio", "largest probability ratio"),
    "ratio/min": Metric("ratio", "smallest probability ratio"),
    "clip/high_frac": Metric("fraction", "tokens whose gradient is cut at the upper bound"),
    "clip/low_frac": Metric("fraction", "tokens whose gradient is cut at the lower bound"),
    "clip/dual_frac": Metric("fraction", "tokens bounded by the dual clip"),
    "kl/old_k1": Metric("nats", "KL from the policy of the rollout, k1 estimate per token"),
    "kl/old_k3": Metric("nats", "KL from the policy of the rollout, k3 estimate per token"),
    "kl/ref_k1": Metric("nats", "KL from the reference policy, k1 estimate per token"),
    "kl/ref_k3": Metric("nats", "KL from the reference policy, k3 estimate per token"),
    "kl/coef": Metric("factor", "KL coefficient in force"),
    "entropy/mean": Metric("nats", "entropy of the policy per response token"),
    "resp_len/mean": Metric("tokens", "mean response length"),
    "resp_len/min": Metric("tokens", "shortest response"),
    "resp_len/max": Metric("tokens", "longest response"),
    "resp_len/truncated_frac": Metric("fraction", "responses cut by the length limit", "lower"),
    "loss/policy": Metric("loss", "policy term of the loss"),
    "loss/kl": Metric("loss", "KL term of the loss, coefficient included"),
    "loss/entropy": Metric("loss", "entropy term of the loss, coefficient included"),
    "loss/total": Metric("loss", "what the gradient is taken of", "lower"),
    "loss/sft": Metric("nats", "negative log-likelihood per response token", "lower"),
    "loss/preference": Metric("loss", "mean loss of preference pairs", "lower"),
    "grad/norm": Metric("norm", "L2 norm of the gradient before clipping"),
    "grad/clipped": Metric("0 or 1", "whether the gradient was scaled down"),
    "lr": Metric("rate", "learning rate of the step"),
    "mismatch/k1": Metric("nats", "engine against trainer on the same tokens, k1", None),
    "mismatch/k3": Metric("nats", "engine against trainer on the same tokens, k3", "lower"),
    "mismatch/abs_max": Metric("nats", "largest difference of a token's log-prob", "lower"),
    "mismatch/abs_mean": Metric("nats", "mean absolute difference of log-probs", "lower"),
    "staleness/mean": Metric("updates", "mean age of the policy that sampled a token", "lower"),
    "staleness/max": Metric("updates", "largest age of the policy that sampled a token", "lower"),
    "ess/token": Metric("fraction", "effective sample size of the importance weights", "higher"),
    "sampling/rounds": Metric("rounds", "rounds of sampling to fill the batch", "lower"),
    "sampling/accept_frac": Metric("fraction", "sampled groups that were kept", "higher"),
    "train/skipped_empty": Metric("count", "updates skipped because no token took loss", "lower"),
    # held-out evaluation
    "eval/greedy_accuracy": Metric("fraction", "greedy held-out accuracy", "higher"),
    "eval/greedy_low": Metric("fraction", "lower 95 % bound of the greedy accuracy", "higher"),
    "eval/greedy_high": Metric("fraction", "upper 95 % bound of the greedy accuracy", "higher"),
    "eval/sampled_accuracy": Metric("fraction", "mean sampled held-out accuracy", "higher"),
    "eval/sampled_low": Metric("fraction", "lower 95 % bound of the sampled accuracy", "higher"),
    "eval/sampled_high": Metric("fraction", "upper 95 % bound of the sampled accuracy", "higher"),
    "eval/num_problems": Metric("count", "held-out problems evaluated"),
    "eval/gain": Metric("fraction", "accuracy minus the baseline's, same problems", "higher"),
    "eval/gain_low": Metric("fraction", "lower 95 % bound of the gain", "higher"),
    "eval/gain_high": Metric("fraction", "upper 95 % bound of the gain", "higher"),
    # reward model
    "rm/pair_accuracy": Metric("fraction", "training pairs ranked right", "higher"),
    "rm/held_out_pair_accuracy": Metric("fraction", "held-out pairs ranked right", "higher"),
    "rm/held_out_low": Metric("fraction", "lower 95 % bound of it", "higher"),
    "rm/held_out_high": Metric("fraction", "upper 95 % bound of it", "higher"),
    "rm/margin": Metric("reward", "mean score of chosen minus rejected", "higher"),
    "rm/num_pairs": Metric("count", "training pairs"),
    "rm/num_held_out_pairs": Metric("count", "held-out pairs"),
    # supervised fine-tuning
    "sft/loss": Metric("nats", "negative log-likelihood per response token", "lower"),
    "sft/token_accuracy": Metric("fraction", "response tokens predicted right", "higher"),
    # where the time goes
    "time/rollout_s": Metric("s", "sampling responses", "lower"),
    "time/score_s": Metric("s", "scoring responses", "lower"),
    "time/advantage_s": Metric("s", "computing advantages", "lower"),
    "time/update_s": Metric("s", "updating the policy", "lower"),
    "time/sync_s": Metric("s", "giving the engine the new weights", "lower"),
    "time/evaluate_s": Metric("s", "evaluating on held-out problems", "lower"),
    "time/checkpoint_s": Metric("s", "writing a checkpoint", "lower"),
    "time/tracking_s": Metric("s", "handing measurements to the tracker", "lower"),
    "time/step_s": Metric("s", "the whole step", "lower"),
    "time/overhead_ms": Metric("ms", "of the step outside all phases", "lower"),
    "throughput/rollout_tokens_per_s": Metric("tokens/s", "response tokens sampled", "higher"),
    "throughput/update_tokens_per_s": Metric("tokens/s", "response tokens trained on", "higher"),
    "tokens/response": Metric("tokens", "response tokens of the step"),
    "tokens/total": Metric("tokens", "prompt and response tokens of the step"),
    "memory/peak_gb": Metric("GB", "peak memory of the process or the device", "lower"),
}

PREFIXES: dict[str, Metric] = {
    "reward/component/": Metric("reward", "mean of one reward before its weight", "higher"),
    "plugin/": Metric("as its plugin says", "measured by a third party's plugin"),
}


def find_metric(name: str) -> Metric | None:
    """The entry of `name`, or of the prefix it starts with, or None."""
    if name in METRICS:
        return METRICS[name]
    fits = (m for prefix, m in PREFIXES.items() if name.startswith(prefix) and name != prefix)
    return next(fits, None)


def check_names(names: Iterable[str]) -> None:
    """Raise `RunError` for the first name that is no metric, with the nearest that is."""
    for name in names:
        if name not in METRICS and find_metric(name) is None:
            raise RunError(
                f"unknown metric '{name}'{nearest(name, METRICS)}: add it to "
                f"posttrain.core.tracking.metric_names, or start it with one of {sorted(PREFIXES)}"
            )
