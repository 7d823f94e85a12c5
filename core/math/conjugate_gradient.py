"""Conjugate gradients: solve A x = b when A is known only by what it does to a vector."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Solution:
    """`x` [N] and `residual` [N] = b - A x, as the recurrence has it, after `iterations` steps."""

    x: Tensor
    residual: Tensor
    iterations: int

    @property
    def residual_norm(self) -> float:
        return math.sqrt(_dot(self.residual, self.residual))


def conjugate_gradient(
    apply: Callable[[Tensor], Tensor], b: Tensor, *, max_iterations: int, tol: float = 1e-10
) -> Solution:
    """Solve A x = `b` [N] for a symmetric positive definite A given as `apply(v) = A v`.

    Starts from x = 0 and stops when ||residual||^2 < `tol`, after `max_iterations`, or when
    rounding has used up A's positive definiteness. In exact arithmetic as many iterations suffice
    as A has distinct eigenvalues. Each costs one `apply`; the residual is kept, so that A x is
    b - residual without another. Source: Hestenes and Stiefel 1952, algorithm (3:1).
    """
    x, residual, direction = torch.zeros_like(b), b.clone(), b.clone()
    square = _dot(residual, residual)
    for iteration in range(max_iterations):
        if square < tol:
            return Solution(x, residual, iteration)
        image = apply(direction)
        curvature = _dot(direction, image)
        if not curvature > 0:
            return Solution(x, residual, iteration)
        length = square / curvature
        x.add_(direction, alpha=length)
        residual.sub_(image, alpha=length)
        previous, square = square, _dot(residual, residual)
        direction.mul_(square / previous).add_(residual)
    return Solution(x, residual, max_iterations)


def _dot(left: Tensor, right: Tensor) -> float:
    return float(torch.dot(left, right))
