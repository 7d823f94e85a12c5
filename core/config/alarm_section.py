"""The section `alarms` of a run: the thresholds of the rules in `core/alarms.py`."""

from __future__ import annotations

from pydantic import Field

from posttrain.core.config.base import Section


class AlarmsSection(Section):
    """Thresholds of the alarms of `rl` stages; null turns one off. Never changes a result."""

    entropy_collapse: float | None = Field(
        default=0.1,
        gt=0,
        description="entropy/mean below this share of what it was at the first step",
    )
    truncated: float | None = Field(
        default=0.3, gt=0, le=1, description="resp_len/truncated_frac above this"
    )
    length_explosion: float | None = Field(
        default=3.0,
        gt=1,
        description="resp_len/mean above this many times what it was at the first step",
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
    clip_high: float | None = Field(
        default=0.3, gt=0, le=1, description="clip/high_frac above this"
    )
    policy_kl: float | None = Field(
        default=0.1, gt=0, description="kl/old_k3 above this, nats per token"
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
        description="sampling/duplicate_frac above this while most groups are not all correct",
    )
    ess_seq: float | None = Field(default=0.3, gt=0, le=1, description="ess/seq below this")
