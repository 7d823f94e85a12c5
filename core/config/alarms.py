"""The section `alarms`: limits of the rules that warn while a stage trains."""

from __future__ import annotations

from pydantic import Field

from posttrain.core.config.base import Section


class AlarmsSection(Section):
    """Thresholds of the alarms of `rl` stages; null turns one off. Never changes a result."""

    entropy_collapse: float | None = Field(
        default=0.1,
        gt=0,
        description="entropy/mean below this share of what it was at the first step, while "
        "reward/mean does not rise and the problems are not solved",
    )
    entropy_rise: float | None = Field(
        default=2.0,
        gt=1,
        description="entropy/mean of the last five steps above this many times that of the first "
        "five, and by at least 0.5 nats",
    )
    truncated: float | None = Field(
        default=0.3, gt=0, le=1, description="resp_len/truncated_frac above this"
    )
    length_explosion: float | None = Field(
        default=3.0,
        gt=1,
        description="resp_len/mean above this many times what it was at the first step",
    )
    length_stalled: float | None = Field(
        default=1.5,
        gt=1,
        description="resp_len/mean had grown to this many times the first five steps', and neither "
        "it nor reward/mean rose in the last 20; the problems are not solved",
    )
    length_shrinks: float | None = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="resp_len/mean of the last five steps below this share of the first five's, "
        "reward/mean above, and accuracy no higher",
    )
    held_out_flat: float | None = Field(
        default=0.5,
        gt=0,
        description="reward/mean above its first five steps by more than this many standard "
        "deviations of a response's reward, while the mean held-out accuracy of three "
        "evaluations is at most 0.02 above the first",
    )
    overoptimised: bool = Field(
        default=True,
        description="reward/mean above what it was when held-out accuracy was best, while the "
        "accuracy has fallen by more than both its intervals show",
    )
    equal_groups: float | None = Field(
        default=0.9,
        gt=0,
        le=1,
        description="group/zero_adv_frac at least this in each of the last three steps",
    )
    signal_fades: float | None = Field(
        default=0.75,
        gt=0,
        le=1,
        description="group/zero_adv_frac at least this over the last ten steps, and more than at "
        "first; the problems are not solved",
    )
    diversity_lost: float | None = Field(
        default=0.1,
        gt=0,
        le=1,
        description="eval/avg_at/k of three evaluations above the first two by at least this, "
        "while eval/pass_at/k does not rise; needs sampled_evaluation",
    )
    clip_high: float | None = Field(
        default=0.3, gt=0, le=1, description="clip/high_frac above this"
    )
    policy_kl: float | None = Field(
        default=0.1, gt=0, le=1_000, description="kl/old_k3 above this, nats per token"
    )
    kl_target: float | None = Field(
        default=2.0,
        gt=1,
        description="KL to the reference above this many times the target of kl.controller",
    )
    grad_spike: float | None = Field(
        default=10.0,
        gt=1,
        description="grad/norm above this many times the median of the last 20 steps, from five on",
    )
    duplicates: float | None = Field(
        default=0.5,
        gt=0,
        le=1,
        description="sampling/duplicate_frac less acc/mean above this, while most groups are not "
        "all correct",
    )
    ess_seq: float | None = Field(default=0.3, gt=0, le=1, description="ess/seq below this")
