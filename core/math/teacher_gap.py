"""Which tokens have a teacher, and how much likelier it found them than the policy did."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.math.masking import masked

Anchor = Literal["old", "rollout"]


def taught(batch: RolloutBatch) -> Tensor:
    """The tokens [B, T] that take loss, in rows that have a teacher."""
    if batch.teacher_id is None:
        return batch.mask
    return masked(batch.mask, (batch.teacher_id >= 0)[:, None])


def teacher_gap(batch: RolloutBatch, anchor: Anchor) -> Tensor:
    """a = teacher's log-prob - that of the `anchor` policy [B, T] in float64, nats.

    0 under the mask, and where no teacher scored the token.
    """
    teacher = batch.column("teacher_logprobs")
    policy = batch.column("old_logprobs") if anchor == "old" else batch.rollout_logprobs
    known = batch.mask.bool() & ~teacher.isnan()
    return masked(teacher.double(), known) - masked(policy.double(), known)
