"""The critic's loss and explained variance."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from posttrain.core.math.returns import explained_variance, value_loss

NAN = float("nan")
numbers = st.lists(st.floats(-3, 3), min_size=4, max_size=4)


def loss_and_slope(
    value: float, old: float, target: float, **fields: float | None
) -> tuple[float, float, bool]:
    """Loss of one token, its gradient in the value, and whether the clip decided it."""
    v = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
    rest = (torch.tensor([[x]], dtype=torch.float64) for x in (old, target))
    loss, clipped = value_loss(v, *rest, torch.ones(1, 1), **fields)
    (grad,) = torch.autograd.grad(loss.sum(), v)
    return loss.item(), grad.item(), bool(clipped)


def test_the_worked_example_of_the_clip() -> None:
    # V 1.0 from 0.5 towards 1.2 within 0.2: errors 0.04 and (0.7 - 1.2)^2 = 0.25.
    loss, slope, clipped = loss_and_slope(1.0, 0.5, 1.2)
    assert loss == pytest.approx(0.125) and slope == 0.0 and clipped


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "slope", "clipped"),
    [
        (0.6, 0.5, 1.2, 0.18, -0.6, False),  # inside the band
        (0.7, 0.5, 1.2, 0.125, -0.5, False),  # on its end
        (1.0, 0.5, 0.2, 0.32, 0.8, False),  # moved away from the target: the way back is free
        (2.0, 0.5, 1.2, 0.32, 0.8, False),  # far beyond the target: the free error is the worse
        (0.0, 0.5, -1.0, 0.845, 0.0, True),  # moved towards it by more than the band
    ],
)
def test_the_gradient_stops_only_where_the_clip_makes_the_error_larger(
    value: float, old: float, target: float, loss: float, slope: float, clipped: bool
) -> None:
    got = loss_and_slope(value, old, target)
    assert got == (pytest.approx(loss), pytest.approx(slope, abs=1e-12), clipped)


def test_without_a_clip_it_is_half_the_squared_error() -> None:
    assert loss_and_slope(1.0, 0.5, 1.2, clip=None) == (
        pytest.approx(0.02),
        pytest.approx(-0.2),
        False,
    )


@pytest.mark.parametrize(("gap", "loss", "slope"), [(3.0, 4.5, 3.0), (25.0, 200.0, 10.0)])
def test_huber_is_linear_beyond_its_delta(gap: float, loss: float, slope: float) -> None:
    got = loss_and_slope(gap, 0.0, 0.0, clip=None, huber=10.0)
    assert got == (pytest.approx(loss), pytest.approx(slope), False)
    # Within a band that holds nothing back, the clip changes nothing.
    assert loss_and_slope(gap, gap, 0.0, huber=10.0)[:2] == got[:2]


@given(numbers, numbers, numbers)
def test_the_clipped_loss_is_never_below_the_free_one(
    values: list[float], old: list[float], returns: list[float]
) -> None:
    v, o, r = (torch.tensor([x], dtype=torch.float64) for x in (values, old, returns))
    mask = torch.ones(1, 4)
    bounded, clipped = value_loss(v, o, r, mask)
    free, _ = value_loss(v, o, r, mask, clip=None)
    assert torch.equal(bounded > free, clipped) and (bounded >= free).all()


def test_masked_positions_do_not_matter_even_when_they_are_nan() -> None:
    mask = torch.tensor([[1.0, 0.0, 1.0]])

    def run(fill: float) -> tuple[Tensor, Tensor]:
        columns = [torch.tensor([[x, fill, 2 * x]]) for x in (1.0, 0.5, 1.2)]
        values = columns[0].requires_grad_()
        loss, _ = value_loss(values, columns[1], columns[2], mask)
        return loss.detach(), torch.autograd.grad(loss.sum(), values)[0]

    for clean, dirty in zip(run(0.0), run(NAN), strict=True):
        assert torch.equal(clean, dirty) and dirty[0, 1].item() == 0.0


RETURNS = torch.tensor([[1.0, 2.0, 3.0], [4.0, NAN, NAN]], dtype=torch.float64)
MASK = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])


@pytest.mark.parametrize(
    ("values", "wanted"),
    [([1, 2, 3, 4], 1.0), ([7, 7, 7, 7], 0.0), ([4, 3, 2, 1], -3.0), ([2, 3, 4, 5], 1.0)],
)
def test_explained_variance(values: list[float], wanted: float) -> None:
    critic = torch.tensor([values[:3], [values[3], NAN, NAN]], dtype=torch.float64)
    assert explained_variance(critic, RETURNS, MASK) == pytest.approx(wanted, abs=1e-12)


def test_equal_returns_leave_nothing_to_explain() -> None:
    same = torch.full((1, 3), 0.3) + torch.tensor([[0.0, 1e-5, 0.0]])
    assert math.isnan(explained_variance(same, same, torch.ones(1, 3)))
    one = torch.tensor([[1.0, 0.0, 0.0]])
    assert math.isnan(explained_variance(RETURNS[:1], RETURNS[:1], one))
