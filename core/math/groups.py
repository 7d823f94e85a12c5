"""Statistics of groups: the responses that were sampled for one prompt.

Axes: B sequences, G scored sequences of one group. All arithmetic is in float64.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.math.masking import row_sums


def outcome_rewards(batch: RolloutBatch) -> Tensor:
    """R [B], float64: the sum of `token_rewards` over `response_mask`.

    It is over `response_mask` and not `mask`, so that a row taken out of the loss still enters its
    group with its own reward.
    """
    return row_sums(batch.column("token_rewards"), batch.response_mask)


def scored_groups(group_ids: Tensor, scored: Tensor) -> Iterator[Tensor]:
    """Row indices [G] of the scored rows of each group with at least one, groups by ascending id.

    `group_ids` and `scored` are [B]; rows of a group need not be adjacent.
    """
    eligible = scored.bool()
    for group in torch.unique(group_ids[eligible]):
        yield torch.nonzero((group_ids == group) & eligible).squeeze(1)


def all_equal(values: Tensor, zero_tol: float) -> bool:
    """Whether `values` [G] are equal up to rounding: max - min <= zero_tol * max(1, max |values|).

    Ask this before dividing by a standard deviation: rounding leaves an all-equal group with a tiny
    mean error and a tiny deviation, and their quotient is anything up to 1.
    """
    spread = float(values.max() - values.min())
    return spread <= zero_tol * max(1.0, float(values.abs().max()))


def sample_std(values: Tensor, ddof: int) -> float:
    """Standard deviation of `values` [G], divisor G - `ddof`; 0 when that is 0 or less."""
    if values.numel() <= ddof:
        return 0.0
    return float(values.std(correction=ddof))


def leave_one_out(values: Tensor) -> Iterator[Tensor]:
    """For each of `values` [G] the others [G - 1], in order."""
    for index in range(values.numel()):
        yield torch.cat([values[:index], values[index + 1 :]])
