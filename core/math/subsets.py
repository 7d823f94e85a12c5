"""The best of k draws: pass@k, and the expected maximum over random subsets of a group.

Subsets are drawn uniformly without replacement from G values; binomial coefficients are exact
integers, so nothing overflows. Axes: G values of one group.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


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
