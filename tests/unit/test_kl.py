"""KL estimators `"k1"`, `"k2"`, `"k3"` and the `"fixed"` controller."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from posttrain.core.contracts import KlController, KlEstimator
from posttrain.core.errors import ConfigError
from posttrain.core.plugin_manager import PluginManager

MANAGER = PluginManager()
logits_of_five = st.lists(st.floats(-2, 2), min_size=5, max_size=5)


def kl_values(name: str, logprobs: Tensor, ref: Tensor, **fields: object) -> Tensor:
    return MANAGER.build(KlEstimator, name, fields).kl(logprobs, ref)


def expected_gradients(name: str, logits: Tensor, ref: Tensor) -> tuple[Tensor, Tensor]:
    """Exact expectations over the vocabulary of the gradient in `logits` [V].

    First as a loss (through the estimate itself), then in the reward (value times score).
    """
    logits = logits.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    weights = logprobs.detach().exp()
    values = kl_values(name, logprobs, ref)
    (as_loss,) = torch.autograd.grad((weights * values).sum(), logits, retain_graph=True)
    (in_reward,) = torch.autograd.grad((weights * values.detach() * logprobs).sum(), logits)
    return as_loss, in_reward


POLICY = torch.tensor([0.5, 0.5], dtype=torch.float64).log()
REFERENCE = torch.tensor([0.25, 0.75], dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("name", "values", "mean", "variance", "as_loss", "in_reward"),
    [
        ("k1", [0.693147, -0.405465], 0.143841, 0.301737, 0.0, 0.274653),
        ("k2", [0.240227, 0.082201], 0.161214, 0.006243, 0.274653, 0.039506),
        ("k3", [0.193147, 0.094535], 0.143841, 0.002431, 0.25, 0.024653),
    ],
)
def test_two_outcomes(
    name: str,
    values: list[float],
    mean: float,
    variance: float,
    as_loss: float,
    in_reward: float,
) -> None:
    got = kl_values(name, POLICY, REFERENCE)
    assert got.tolist() == pytest.approx(values, abs=1e-6)
    assert got.mean().item() == pytest.approx(mean, abs=1e-6)
    assert got.var(correction=0).item() == pytest.approx(variance, abs=1e-6)
    loss_gradient, reward_gradient = expected_gradients(name, POLICY, REFERENCE)
    assert loss_gradient[0].item() == pytest.approx(as_loss, abs=1e-6)
    assert reward_gradient[0].item() == pytest.approx(in_reward, abs=1e-6)


@given(logits_of_five, logits_of_five)
def test_k2_as_a_loss_and_k1_in_the_reward_have_the_gradient_of_the_kl(
    policy: list[float], reference: list[float]
) -> None:
    logits = torch.tensor(policy, dtype=torch.float64)
    ref = torch.tensor(reference, dtype=torch.float64).log_softmax(0)
    exact = logits.clone().requires_grad_()
    logprobs = exact.log_softmax(0)
    (wanted,) = torch.autograd.grad((logprobs.exp() * (logprobs - ref)).sum(), exact)
    torch.testing.assert_close(expected_gradients("k2", logits, ref)[0], wanted)
    torch.testing.assert_close(expected_gradients("k1", logits, ref)[1], wanted)
    assert expected_gradients("k1", logits, ref)[0].abs().max().item() < 1e-12


@given(logits_of_five, logits_of_five)
def test_k1_and_k3_are_unbiased_and_k2_and_k3_never_negative(
    policy: list[float], reference: list[float]
) -> None:
    logprobs = torch.tensor(policy, dtype=torch.float64).log_softmax(0)
    ref = torch.tensor(reference, dtype=torch.float64).log_softmax(0)
    exact = (logprobs.exp() * (logprobs - ref)).sum()
    for name in ("k1", "k3"):
        mean = (logprobs.exp() * kl_values(name, logprobs, ref)).sum()
        torch.testing.assert_close(mean, exact, rtol=1e-9, atol=1e-12)
    for name in ("k2", "k3"):
        assert kl_values(name, logprobs, ref).min().item() >= -1e-15


def test_k3_keeps_its_digits_near_the_reference_in_float32() -> None:
    value = kl_values("k3", torch.tensor([1e-3]), torch.tensor([0.0]))
    assert value.item() == pytest.approx(0.5e-6, rel=1e-2)


def test_k3_pulls_back_from_far_away_unless_its_output_is_clamped() -> None:
    for fields, value, slope in (({}, 16.0855, -19.0855), ({"output_clamp": 10.0}, 10.0, 0.0)):
        logprob = torch.tensor([-3.0], dtype=torch.float64, requires_grad=True)
        kl = kl_values("k3", logprob, torch.zeros(1, dtype=torch.float64), **fields)
        (grad,) = torch.autograd.grad(kl.sum(), logprob)
        assert kl.item() == pytest.approx(value, abs=1e-4)
        assert grad.item() == pytest.approx(slope, abs=1e-4)


def test_k3_stays_finite_for_log_ratios_of_any_size() -> None:
    far = torch.tensor([-1000.0])
    assert kl_values("k3", far, torch.zeros(1)).isfinite().all()
    assert not kl_values("k3", far, torch.zeros(1), input_clamp=None).isfinite().all()


def test_the_fixed_controller_keeps_its_coefficient_whatever_it_is_told() -> None:
    controller = MANAGER.build(KlController, "fixed", {"coef": 0.03})
    controller.update(kl_per_token=5.0, kl_per_sequence=50.0, num_rows=8)
    controller.load_state(controller.state())
    assert controller.coefficient() == 0.03
    assert MANAGER.build(KlController, "fixed").coefficient() == 0.04
    with pytest.raises(ConfigError, match="coef"):
        MANAGER.build(KlController, "fixed", {"coef": -1})
