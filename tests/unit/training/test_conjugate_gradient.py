"""Conjugate gradients against a direct solver."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from posttrain.core.math.conjugate_gradient import conjugate_gradient


def positive_definite(size: int, condition: float, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    basis, _ = torch.linalg.qr(
        torch.randn(size, size, generator=generator, dtype=torch.float64), mode="complete"
    )
    return (basis * torch.linspace(1, condition, size, dtype=torch.float64) @ basis.T).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-4)], ids=["64", "32"]
)
@pytest.mark.parametrize("size", [1, 7, 40])
def test_it_solves_what_a_direct_solver_solves(
    size: int, dtype: torch.dtype, tolerance: float
) -> None:
    matrix = positive_definite(size, 50.0, dtype)
    b = torch.randn(size, generator=torch.Generator().manual_seed(1), dtype=dtype)
    found = conjugate_gradient(lambda v: matrix @ v, b, max_iterations=200, tol=1e-13)
    direct = torch.linalg.solve(matrix, b)
    torch.testing.assert_close(found.x, direct, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(b - matrix @ found.x, found.residual, rtol=0, atol=tolerance)
    assert found.residual_norm**2 < 1e-13


def test_as_many_iterations_as_distinct_eigenvalues_suffice() -> None:
    diagonal = torch.tensor([1.0, 1.0, 4.0, 4.0, 4.0, 9.0], dtype=torch.float64)
    b = torch.tensor([1.0, -2.0, 3.0, 0.5, 1.0, 2.0], dtype=torch.float64)
    two = conjugate_gradient(lambda v: diagonal * v, b, max_iterations=2)
    three = conjugate_gradient(lambda v: diagonal * v, b, max_iterations=3)
    assert two.residual_norm > 1e-2 > 1e-10 > three.residual_norm
    torch.testing.assert_close(three.x, b / diagonal)
    assert conjugate_gradient(lambda v: diagonal * v, b, max_iterations=99).iterations == 3


def test_a_zero_right_hand_side_asks_for_no_product() -> None:
    def refuse(v: Tensor) -> Tensor:
        raise AssertionError("there is nothing to solve")

    found = conjugate_gradient(refuse, torch.zeros(5), max_iterations=10)
    assert not found.x.any() and found.iterations == 0


def test_an_operator_that_is_not_positive_ends_the_search_with_what_there_is() -> None:
    found = conjugate_gradient(lambda v: -v, torch.ones(3), max_iterations=10)
    assert not found.x.any() and found.iterations == 0
    nothing = conjugate_gradient(lambda v: v * float("nan"), torch.ones(3), max_iterations=10)
    assert torch.isfinite(nothing.x).all()
