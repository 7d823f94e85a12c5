"""Prompts that teach nothing, taken out of an update: not out of group statistics or the record.

An all-equal group has no policy gradient, but its tokens still dilute a token mean and feel KL and
entropy terms. DAPO (arXiv:2503.14476, section 3.2) trains on none of them.
"""

from __future__ import annotations

from typing import Literal

import torch

from posttrain.core.batch import RolloutBatch
from posttrain.core.math.groups import all_equal
from posttrain.core.math.masking import masked

Rule = Literal["none", "equal_accuracy", "zero_advantage"]
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
