"""Two variants on one frozen step, side by side. Axes: B rows, T response tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from posttrain.core.compare.variant import VariantResult
from posttrain.core.compare.vectors import (
    VectorDifference,
    largest_differences,
    rank_correlation,
    vector_difference,
)


@dataclass(frozen=True, slots=True)
class TokenGap:
    """A token on which two variants put different weight; `row` and `column` are of the batch."""

    row: int
    column: int
    first: float
    second: float


@dataclass(frozen=True, slots=True)
class PairResult:
    """`second` against `first`, over the tokens that may have loss.

    `advantage_rank` is Spearman's rho of the responses' mean advantages. `largest` are the tokens
    with the largest |difference| of weights.
    """

    first: str
    second: str
    weights: VectorDifference
    advantage_rank: float | None
    largest: tuple[TokenGap, ...]


def compare_pair(
    first: VariantResult, second: VariantResult, mask: Tensor, count: int = 10
) -> PairResult:
    """All of it for two results on tokens `mask` [B, T]; responses without such a token are out."""
    tokens = mask.bool()
    places, rows = tokens.nonzero(), tokens.any(dim=1)
    a, b = first.weights[tokens], second.weights[tokens]
    ranks = [result.row_advantages(mask)[rows] for result in (first, second)]
    largest = [
        TokenGap(int(places[i, 0]), int(places[i, 1]), float(a[i]), float(b[i]))
        for i in largest_differences(a, b, count)
    ]
    return PairResult(
        first.label,
        second.label,
        vector_difference(a, b),
        rank_correlation(*ranks),
        tuple(largest),
    )
