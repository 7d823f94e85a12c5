"""How much likelier a teacher found sampled tokens than the policy did."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.math.masking import masked

Anchor = Literal["old", "rollout"]


def teacher_gap(batch: RolloutBatch, anchor: Anchor) -> Tensor:
    """a = teacher's log-prob - that of the `anchor` policy [B, T] in float64, nats.

    0 under the mask, and where no teacher scored the token.
    """
    teacher = batch.column("teacher_logprobs")
    policy = batch.column("old_logprobs") if anchor == "old" else batch.rollout_logprobs
    known = batch.mask.bool() & ~teacher.isnan()
    return masked(teacher.double(), known) - masked(policy.double(), known)
