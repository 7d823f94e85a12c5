"""How two vectors of gradient weights, or two rankings, differ.

All are of the same places in the same order, 1-D. Sums are in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from scipy.stats import rankdata
from torch import Tensor


@dataclass(frozen=True, slots=True)
class VectorDifference:
    """`second` against `first`; None where a vector is 0 and the quantity does not exist.

    `norm_ratio` is |second| / |first|. `sign_differs` is the share of the places at which either is
    not 0 where their signs (+, -, 0) differ; `opposite` the share where one is + and the other -.
    """

    cosine: float | None
    norm_ratio: float | None
    sign_differs: float | None
    opposite: float | None


def vector_difference(first: Tensor, second: Tensor) -> VectorDifference:
    """Direction, length and signs of two vectors [N]."""
    a, b = first.double(), second.double()
    norm_a, norm_b = float(a.norm()), float(b.norm())
    either = (a != 0) | (b != 0)
    count = int(either.sum())
    differs, opposite = a.sign() != b.sign(), a.sign() * b.sign() < 0
    return VectorDifference(
        cosine=bounded(float(a @ b) / norm_a / norm_b) if norm_a and norm_b else None,
        norm_ratio=norm_b / norm_a if norm_a else None,
        sign_differs=int(differs.sum()) / count if count else None,
        opposite=int(opposite.sum()) / count if count else None,
    )


def bounded(cosine: float) -> float:
    """A cosine that rounding took beyond 1 or -1, back at it."""
    return max(-1.0, min(1.0, cosine))


def rank_correlation(first: Tensor, second: Tensor) -> float | None:
    """Spearman's rho of two vectors [N], ties at their mean rank.

    None for fewer than two places or where all values of either are equal: there is no order.
    """
    if first.numel() < 2:
        return None
    a, b = (torch.from_numpy(rankdata(v.double().numpy())) for v in (first, second))
    a, b = a - a.mean(), b - b.mean()
    scale = math.sqrt(float(a @ a) * float(b @ b))
    return bounded(float(a @ b) / scale) if scale else None


def largest_differences(first: Tensor, second: Tensor, count: int) -> list[int]:
    """The `count` places at which |second - first| is largest and not 0, largest first."""
    gaps = (second.double() - first.double()).abs()
    order = torch.argsort(gaps, descending=True, stable=True)[:count]
    return [int(place) for place in order if gaps[place] > 0]
