"""Scores of the steps of a response: which count, their aggregate, their place on the tokens.

`step_end` [B, S] is the token index that ends each step, -1 where there is none; `step_score`
[B, S] its score, which may be NaN (unscored). Axes: B sequences, S padded steps, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from posttrain.core.math.masking import masked, row_sums

Aggregate = Literal["mean", "min", "last", "sum", "prod", "weighted"]


def scored_steps(step_end: Tensor, step_score: Tensor) -> Tensor:
    return (step_end >= 0) & step_score.isfinite()


def aggregate_steps(
    scores: Tensor, valid: Tensor, how: Aggregate, weights: Sequence[float] = ()
) -> Tensor:
    """One number [B] per response from its valid `scores` [B, S], float64; NaN without a step.

    `weighted` is sum_j w_j p_j / sum_j w_j, the j-th valid step weighing `weights[j]` and every
    further one as the last.
    """
    scores, count = scores.double(), valid.sum(dim=1)
    inf = torch.full_like(scores, torch.inf)
    if how == "min":
        result = torch.where(valid, scores, inf).amin(dim=1)
    elif how == "prod":
        result = torch.where(valid, scores, torch.ones_like(scores)).prod(dim=1)
    elif how == "last":
        rank = valid.cumsum(dim=1)
        result = row_sums(scores, valid & (rank == count[:, None]))
    elif how == "weighted":
        table = torch.tensor(list(weights), dtype=torch.float64)
        rank = (valid.cumsum(dim=1) - 1).clamp(min=0, max=len(table) - 1)
        factors = masked(table[rank], valid)
        result = row_sums(scores * factors, valid) / factors.sum(dim=1)
    else:
        result = row_sums(scores, valid)
        if how == "mean":
            result = result / count
    return torch.where(count > 0, result, torch.full_like(result, torch.nan))


def sums_of_later_steps(scores: Tensor, step_end: Tensor, valid: Tensor, width: int) -> Tensor:
    """Sum [B, T] of the valid `scores` [B, S] whose step ends at token t or later; T is `width`."""
    at_end = torch.zeros(scores.shape[0], width, dtype=torch.float64)
    at_end.scatter_add_(1, step_end.clamp(min=0), masked(scores.double(), valid))
    return at_end.flip(1).cumsum(1).flip(1)
