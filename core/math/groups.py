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


def equal_share(
    rewards: Tensor, group_ids: Tensor, scored: Tensor, zero_tol: float = 1e-6
) -> float:
    """Share of groups whose scored `rewards` [B] are all equal, groups of one included."""
    members = list(scored_groups(group_ids, scored))
    return sum(all_equal(rewards[rows], zero_tol) for rows in members) / max(1, len(members))


def sample_std(values: Tensor, ddof: int) -> float:
    """Standard deviation of `values` [G], divisor G - `ddof`; 0 when that is 0 or less."""
    if values.numel() <= ddof:
        return 0.0
    return float(values.std(correction=ddof))


def z_scores(values: Tensor, ddof: int, eps: float) -> Tensor:
    """(x - mean) / (std + eps) of `values` [G]; ask `all_equal` first."""
    return (values - values.mean()) / (sample_std(values, ddof) + eps)


def leave_one_out(values: Tensor) -> Iterator[Tensor]:
    """For each of `values` [G] the others [G - 1], in order."""
    for index in range(values.numel()):
        yield torch.cat([values[:index], values[index + 1 :]])


def mean_over_nodes(values: Tensor, node_id: Tensor, group_id: Tensor, mask: Tensor) -> Tensor:
    """`values` [B, T] averaged over the rows of a group that share a tree node in that column.

    `node_id` [B, T] names the node that generated each token: copies of a shared prefix share it in
    the same columns. Masked rows take no part; with no shared node, `values` is returned unchanged.
    """
    totals, sharers = torch.zeros_like(values), node_sharers(node_id, group_id, mask)
    for row in range(values.shape[0]):
        same = _same_node(row, node_id, group_id, mask)
        totals[row] = torch.where(same, values, torch.zeros_like(values)).sum(dim=0)
    return torch.where(mask.bool(), totals / sharers, values)


def node_sharers(node_id: Tensor, group_id: Tensor, mask: Tensor) -> Tensor:
    """How many rows of a group share each token's tree node [B, T], float64; 1 under the mask."""
    counts = torch.ones(node_id.shape, dtype=torch.float64)
    for row in range(node_id.shape[0]):
        counts[row] = _same_node(row, node_id, group_id, mask).sum(dim=0).clamp(min=1).double()
    return torch.where(mask.bool(), counts, torch.ones_like(counts))


def _same_node(row: int, node_id: Tensor, group_id: Tensor, mask: Tensor) -> Tensor:
    """Which tokens [B, T] are copies of the token that `row` has in the same column."""
    return (node_id == node_id[row]) & (group_id == group_id[row])[:, None] & mask.bool()
