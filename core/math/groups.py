"""Statistics of groups of responses to one prompt: deviations, leave-one-out, pass@k.

Axes: B sequences, G scored sequences of one group. All arithmetic is in float64.

Subsets are drawn uniformly without replacement from G values; binomial coefficients are exact
integers, so nothing overflows. Axes: G values of one group.
"""

from __future__ import annotations

import math
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


def equal_share(rewards: Tensor, group_ids: Tensor, scored: Tensor) -> float:
    """Share of groups whose scored `rewards` [B] are all equal, groups of one included."""
    members = list(scored_groups(group_ids, scored))
    return sum(all_equal(rewards[rows], 1e-6) for rows in members) / max(1, len(members))


def sample_std(values: Tensor, ddof: int) -> float:
    """Standard deviation of `values` [G], divisor G - `ddof`; 0 when that is 0 or less."""
    if values.numel() <= ddof:
        return 0.0
    return float(values.std(correction=ddof))


def z_scores(values: Tensor, ddof: int, eps: float) -> Tensor:
    """(x - mean) / (std + eps) of `values` [G]; ask `all_equal` first."""
    return (values - values.mean()) / (sample_std(values, ddof) + eps)


def optimal_value(values: Tensor, beta: float) -> Tensor:
    """beta ln(mean exp(x / beta)) of `values` [G]: from their mean (large beta) to their maximum.

    Source: A*-PO, arXiv:2505.20686.
    """
    return beta * ((values / beta).logsumexp(dim=0) - math.log(values.numel()))


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


def pass_at_k(total: int, correct: int, k: int) -> float:
    """Unbiased probability that k of `total` responses, `correct` of them right, hold a right one.

    1 - C(n - c, k) / C(n, k), as 1 - prod_{i = n-c+1}^{n} (1 - k / i). Raises `ValueError` unless
    1 <= k <= total and 0 <= correct <= total.
    Source: Chen et al., arXiv:2107.03374, section 2.1.
    """
    if not (1 <= k <= total and 0 <= correct <= total):
        raise ValueError(
            f"k is {k} and correct is {correct} for {total} responses; expected 1 <= k <= "
            f"{total} and 0 <= correct <= {total}"
        )
    return 1.0 - math.prod(max(0.0, 1 - k / i) for i in range(total - correct + 1, total + 1))


def pass_at_k_scores(verdicts: Tensor, k: int) -> Tensor:
    """Standardised pass@k credit [N] of `verdicts` [N] of 0 and 1; 0 if all draws agree.

    With P = pass@k of the group and s = sqrt(P (1 - P)): (1 - P) / s if right, and less the share
    of failing draws among those that hold i, over s, if wrong. They sum to 0.
    Source: arXiv:2508.10751, eq. 11-15.
    """
    total, correct = verdicts.numel(), int(verdicts.sum())
    passed = pass_at_k(total, correct, k)
    sigma = math.sqrt(passed * (1 - passed))
    if sigma == 0:
        return torch.zeros_like(verdicts)
    fails = _choose(total - correct - 1, k - 1) / _choose(total - 1, k - 1)
    right = torch.full_like(verdicts, (1 - passed) / sigma)
    return torch.where(verdicts > 0, right, right - fails / sigma)


def expected_max_with_each(values: Tensor, k: int) -> Tensor:
    """For each of `values` [G] the mean maximum over the subsets of size k that hold it.

    Needs 1 <= k <= G. O(G log G).
    """
    ordered, order = values.double().sort()
    size = values.numel()
    total = _choose(size - 1, k - 1)
    is_best = torch.tensor([_choose(j, k - 1) / total for j in range(size)], dtype=torch.float64)
    # A larger value is the best of C(j - 1, k - 2) subsets that hold a given smaller one.
    beaten = torch.tensor([_choose(j - 1, k - 2) / total for j in range(size)], dtype=torch.float64)
    result = ordered * is_best + _sums_after(ordered * beaten)
    return torch.empty_like(result).scatter(0, order, result)


def expected_max_without_each(values: Tensor, k: int) -> Tensor:
    """For each of `values` [G] the mean maximum over the subsets of size k of the others.

    Needs 1 <= k <= G - 1. O(G log G).
    """
    ordered, order = values.double().sort()
    size = values.numel()
    total = _choose(size - 1, k)
    below = torch.tensor([_choose(j, k - 1) / total for j in range(size)], dtype=torch.float64)
    above = torch.tensor([_choose(j - 1, k - 1) / total for j in range(size)], dtype=torch.float64)
    result = _sums_before(ordered * below) + _sums_after(ordered * above)
    return torch.empty_like(result).scatter(0, order, result)


def _choose(n: int, k: int) -> int:
    """C(n, k), 0 where there is no such subset."""
    return math.comb(n, k) if 0 <= k <= n else 0


def _sums_before(values: Tensor) -> Tensor:
    return torch.cat([values.new_zeros(1), values.cumsum(0)[:-1]])


def _sums_after(values: Tensor) -> Tensor:
    return _sums_before(values.flip(0)).flip(0)
