"""Which rows of a rollout batch an update trains on: groups left out, rows drawn again.

A group with equal rewards has no policy gradient, but its tokens still dilute a token mean and feel
KL and entropy terms. DAPO (arXiv:2503.14476, section 3.2) trains on none of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from posttrain.core.batch import RolloutBatch
from posttrain.core.math.groups import all_equal, outcome_rewards
from posttrain.core.math.masking import masked
from posttrain.core.math.shaping import resampling_weights

Rule = Literal["none", "equal_accuracy", "zero_advantage"]
Method = Literal["pow", "max_min", "max_random"]
TOLERANCE = 1e-6


def drop_groups(batch: RolloutBatch, rule: Rule) -> tuple[RolloutBatch, dict[str, float]]:
    """`batch` with the mask of uninformative groups emptied, and the share that was dropped.

    `equal_accuracy` looks at the verifier's raw verdict, before any shaping: all right (1) or all
    wrong (below 1). `zero_advantage` looks at the reward: all equal up to rounding.
    """
    if rule == "none":
        return batch, {}
    keep = torch.ones(len(batch), dtype=torch.bool)
    num_groups = num_dropped = 0
    for rows in batch.groups():
        scored = rows[batch.column("scored")[rows].bool()]
        if rule == "equal_accuracy":
            correct = batch.column("acc")[scored] >= 1
            uninformative = bool(correct.all() | ~correct.any())
        else:
            rewards = batch.column("rewards")[scored]
            uninformative = scored.numel() < 2 or all_equal(rewards, TOLERANCE)
        num_groups += 1
        num_dropped += int(uninformative)
        keep[rows] = not uninformative
    kept = masked(batch.mask, keep[:, None].expand(batch.mask.shape))
    return batch.with_columns(mask=kept), {"group/dropped_frac": num_dropped / max(1, num_groups)}


def resample(
    batch: RolloutBatch, method: Method, power: float, generator: torch.Generator
) -> RolloutBatch:
    """As many rows as `batch` has, drawn from its scored ones; advantages stay as they are.

    A noisy reward model errs most on middling answers, so the extremes are drawn more often. Rows
    of a group stay adjacent. With nothing scored the batch is returned as it is.
    Source: Policy Filtration for RLHF, arXiv:2409.06957, section 3.
    """
    scored = batch.column("scored").bool().nonzero().squeeze(1)
    if scored.numel() == 0:
        return batch
    weights = resampling_weights(outcome_rewards(batch)[scored], method, power)
    drawn = torch.multinomial(weights, len(batch), replacement=True, generator=generator)
    rows = scored[drawn].sort().values
    return replace(batch.select(rows), seq_id=torch.arange(len(batch)))
