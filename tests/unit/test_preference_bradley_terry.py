"""The `"bradley_terry"` preference loss."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.contracts import PairLoss, PairScores
from posttrain.core.plugin_manager import PluginManager

MANAGER = PluginManager()
scores = st.floats(-8, 8)


def loss_and_grads(
    chosen: float, rejected: float, pair_margin: float = 0.0, **fields: object
) -> tuple[float, float, float]:
    """Loss of one pair and its gradients in the two scores."""
    loss = MANAGER.build(PairLoss, "bradley_terry", fields)
    c = torch.tensor([chosen], dtype=torch.float64, requires_grad=True)
    r = torch.tensor([rejected], dtype=torch.float64, requires_grad=True)
    margin = torch.tensor([pair_margin], dtype=torch.float64)
    value = loss.pair_loss(PairScores.of_rewards(c, r, margin))
    assert value.shape == (1,)
    grads = torch.autograd.grad(value.sum(), (c, r))
    return value.item(), grads[0].item(), grads[1].item()


def test_equal_scores_cost_ln_2_and_push_apart_by_one_half() -> None:
    assert loss_and_grads(1.3, 1.3) == pytest.approx((math.log(2), -0.5, 0.5))


def test_margins_of_the_pair_and_of_the_config_add_up() -> None:
    wanted = (math.log(2), -0.5, 0.5)
    assert loss_and_grads(2.0, 0.5, pair_margin=1.5) == pytest.approx(wanted)
    assert loss_and_grads(2.0, 0.5, pair_margin=0.5, margin=1.0) == pytest.approx(wanted)


@given(scores, scores, st.floats(-5, 5))
def test_a_common_shift_changes_nothing_without_the_centre_term(
    chosen: float, rejected: float, shift: float
) -> None:
    base = loss_and_grads(chosen, rejected)
    assert loss_and_grads(chosen + shift, rejected + shift) == pytest.approx(base, abs=1e-9)


@given(scores, scores)
def test_the_gradient_is_one_minus_the_probability_of_being_right(
    chosen: float, rejected: float
) -> None:
    _, down, up = loss_and_grads(chosen, rejected)
    wrong = 1 / (1 + math.exp(chosen - rejected))
    assert (down, up) == (pytest.approx(-wrong), pytest.approx(wrong))


def test_the_centre_term_adds_the_square_of_the_sum() -> None:
    plain = loss_and_grads(2.0, 1.0)
    centred = loss_and_grads(2.0, 1.0, centre_coef=0.01)
    assert centred == pytest.approx((plain[0] + 0.09, plain[1] + 0.06, plain[2] + 0.06))


def test_scores_far_apart_stay_finite() -> None:
    assert loss_and_grads(-1000.0, 1000.0) == pytest.approx((2000.0, -1.0, 1.0))
    assert loss_and_grads(1000.0, -1000.0) == (0.0, 0.0, 0.0)
