"""KL estimators `"k1"`, `"k2"`, `"k3"`, `"abs"`, `"k1+"`, `"k2+"`, `"k3+"`, `"abs+"`, `"k3_is"`,
`"full"`: exact facts, most of them by enumerating a small vocabulary."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from posttrain.core.contracts import KlEstimator
from posttrain.core.errors import ConfigError, RunError
from posttrain.core.plugin_manager import PluginManager

MANAGER = PluginManager()
SAMPLED = ["k1", "k2", "k3", "abs"]
STRAIGHT_THROUGH = [f"{name}+" for name in SAMPLED]
logits_of_five = st.lists(st.floats(-2, 2), min_size=5, max_size=5)


def kl_values(
    name: str, logprobs: Tensor, ref: Tensor, ratio: Tensor | None = None, **fields: object
) -> Tensor:
    return MANAGER.build(KlEstimator, name, fields).kl(logprobs, ref, ratio)


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


def exact_kl_and_gradient(logits: Tensor, ref: Tensor) -> tuple[Tensor, Tensor]:
    """KL(policy || reference) and its gradient in `logits` [V], from the definition."""
    logits = logits.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    kl = (logprobs.exp() * (logprobs - ref)).sum()
    return kl.detach(), torch.autograd.grad(kl, logits)[0]


def slope(name: str, gap: float, **fields: object) -> tuple[float, float]:
    """Value and d value / d logprob of one token at d = `gap`."""
    logprob = torch.tensor([gap], dtype=torch.float64, requires_grad=True)
    value = kl_values(name, logprob, torch.zeros(1, dtype=torch.float64), **fields)
    (grad,) = torch.autograd.grad(value.sum(), logprob)
    return value.item(), grad.item()


POLICY = torch.tensor([0.5, 0.5], dtype=torch.float64).log()
REFERENCE = torch.tensor([0.25, 0.75], dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("name", "values", "mean", "variance", "as_loss", "in_reward"),
    [
        ("k1", [0.693147, -0.405465], 0.143841, 0.301737, 0.0, 0.274653),
        ("k2", [0.240227, 0.082201], 0.161214, 0.006243, 0.274653, 0.039506),
        ("k3", [0.193147, 0.094535], 0.143841, 0.002431, 0.25, 0.024653),
        ("abs", [0.693147, 0.405465], 0.549306, 0.020690, 0.5, 0.071921),
        ("k1+", [0.693147, -0.405465], 0.143841, 0.301737, 0.274653, 0.274653),
        ("k2+", [0.240227, 0.082201], 0.161214, 0.006243, 0.274653, 0.039506),
        ("k3+", [0.193147, 0.094535], 0.143841, 0.002431, 0.274653, 0.024653),
        ("abs+", [0.693147, 0.405465], 0.549306, 0.020690, 0.274653, 0.071921),
        ("k3_is", [0.193147, 0.094535], 0.143841, 0.002431, 0.274653, 0.024653),
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


def test_k3_pulls_each_of_the_two_outcomes_with_1_minus_the_inverse_ratio() -> None:
    logprobs = POLICY.clone().requires_grad_()
    (grad,) = torch.autograd.grad(kl_values("k3", logprobs, REFERENCE).sum(), logprobs)
    torch.testing.assert_close(grad, torch.tensor([0.5, -0.5], dtype=torch.float64))


@given(logits_of_five, logits_of_five)
def test_which_estimates_have_the_gradient_of_the_kl(
    policy: list[float], reference: list[float]
) -> None:
    logits = torch.tensor(policy, dtype=torch.float64)
    ref = torch.tensor(reference, dtype=torch.float64).log_softmax(0)
    _, wanted = exact_kl_and_gradient(logits, ref)
    for name in ("k2", "k3_is", *STRAIGHT_THROUGH):
        torch.testing.assert_close(expected_gradients(name, logits, ref)[0], wanted)
    torch.testing.assert_close(expected_gradients("k1", logits, ref)[1], wanted)
    assert expected_gradients("k1", logits, ref)[0].abs().max().item() < 1e-12


@given(logits_of_five, logits_of_five)
def test_k3_as_a_loss_has_the_gradient_of_the_other_kl(
    policy: list[float], reference: list[float]
) -> None:
    logits = torch.tensor(policy, dtype=torch.float64)
    ref = torch.tensor(reference, dtype=torch.float64).log_softmax(0)
    free = logits.clone().requires_grad_()
    forward = (ref.exp() * (ref - free.log_softmax(0))).sum()
    (wanted,) = torch.autograd.grad(forward, free)
    torch.testing.assert_close(expected_gradients("k3", logits, ref)[0], wanted)


@given(logits_of_five, logits_of_five)
def test_which_values_are_unbiased_and_which_never_negative(
    policy: list[float], reference: list[float]
) -> None:
    logits = torch.tensor(policy, dtype=torch.float64)
    logprobs = logits.log_softmax(0)
    ref = torch.tensor(reference, dtype=torch.float64).log_softmax(0)
    exact, _ = exact_kl_and_gradient(logits, ref)
    for name in ("k1", "k3", "k1+", "k3+", "k3_is"):
        mean = (logprobs.exp() * kl_values(name, logprobs, ref)).sum()
        torch.testing.assert_close(mean, exact, rtol=1e-9, atol=1e-12)
    for name in ("k2", "k3", "abs"):
        assert kl_values(name, logprobs, ref).min().item() >= -1e-15
    assert (logprobs.exp() * kl_values("abs", logprobs, ref)).sum() >= exact - 1e-12


@given(logits_of_five, logits_of_five, logits_of_five)
def test_k3_is_has_value_and_gradient_of_the_kl_off_policy_too(
    policy: list[float], reference: list[float], behaviour: list[float]
) -> None:
    logits = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    ref, old = (torch.tensor(x, dtype=torch.float64).log_softmax(0) for x in (reference, behaviour))
    logprobs = logits.log_softmax(0)
    values = kl_values("k3_is", logprobs, ref, (logprobs - old).exp())
    mean = (old.exp() * values).sum()
    exact, wanted = exact_kl_and_gradient(logits.detach(), ref)
    torch.testing.assert_close(mean.detach(), exact, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(mean, logits)[0], wanted)


def test_k3_is_asks_for_the_ratio_it_was_told_to() -> None:
    for source in ("old", "rollout", "policy"):
        plugin = MANAGER.build(KlEstimator, "k3_is", {"is_ratio": source})
        assert plugin.ratio_source() == source
    assert all(MANAGER.build(KlEstimator, name).ratio_source() is None for name in SAMPLED)


@pytest.mark.parametrize("name", STRAIGHT_THROUGH)
@pytest.mark.parametrize("gap", [-30.0, -3.0, -0.1, 0.0, 0.7, 25.0])
def test_a_plus_keeps_the_value_to_the_bit_and_has_the_unclamped_gap_as_slope(
    name: str, gap: float
) -> None:
    fields = {"output_clamp": 10.0} if name == "k3+" else {}
    value, gradient = slope(name, gap, **fields)
    assert value == slope(name.removesuffix("+"), gap, **fields)[0]
    assert gradient == pytest.approx(gap)


def test_k3_keeps_its_digits_near_the_reference_in_float32() -> None:
    value = kl_values("k3", torch.tensor([1e-3]), torch.tensor([0.0]))
    assert value.item() == pytest.approx(0.5e-6, rel=1e-2)


def test_k3_pulls_back_from_far_away_unless_its_output_is_clamped() -> None:
    assert slope("k3", -3.0) == pytest.approx((16.0855, -19.0855), abs=1e-4)
    assert slope("k3", -3.0, output_clamp=10.0) == (10.0, 0.0)
    # Just inside the bound, at d = -2.5, the pull is whole.
    assert slope("k3", -2.5, output_clamp=10.0)[1] == pytest.approx(1 - 12.182494, abs=1e-6)


@pytest.mark.parametrize(("gap", "held"), [(-20.5, -20.0), (20.5, 20.0), (1000.0, 20.0)])
def test_k3_has_exactly_no_gradient_beyond_its_input_clamp(gap: float, held: float) -> None:
    assert slope("k3", gap) == (slope("k3", held)[0], 0.0)
    assert slope("k3", gap, input_clamp=None)[1] != 0.0 and slope("k3", held)[1] != 0.0


def test_k3_stays_finite_for_log_ratios_of_any_size() -> None:
    far = torch.tensor([-1000.0])
    assert kl_values("k3", far, torch.zeros(1)).isfinite().all()
    assert not kl_values("k3", far, torch.zeros(1), input_clamp=None).isfinite().all()


@given(logits_of_five, logits_of_five)
def test_full_is_the_definition_and_its_gradient(
    policy: list[float], reference: list[float]
) -> None:
    logits = torch.tensor(policy, dtype=torch.float64)
    ref_logits = torch.tensor(reference, dtype=torch.float64)
    exact, wanted = exact_kl_and_gradient(logits, ref_logits.log_softmax(0))
    rows = torch.stack([logits, logits + 3.0]).requires_grad_()
    plugin = MANAGER.build(KlEstimator, "full")
    assert plugin.from_logits
    kl = plugin.kl_of_logits(rows, torch.stack([ref_logits, ref_logits]))
    (grad,) = torch.autograd.grad(kl.sum(), rows)
    torch.testing.assert_close(kl.detach(), exact.expand(2), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(grad, torch.stack([wanted, wanted]))


def test_full_leaves_out_what_the_policy_cannot_draw() -> None:
    inf = float("inf")
    logits = torch.tensor([[0.0, 0.0, -inf]], dtype=torch.float64, requires_grad=True)
    full = MANAGER.build(KlEstimator, "full")
    kl = full.kl_of_logits(logits, torch.tensor([[0.0, 0.0, -inf]], dtype=torch.float64))
    (grad,) = torch.autograd.grad(kl.sum(), logits)
    assert kl.item() == 0.0 and grad.isfinite().all()
    reference = torch.tensor([[0.25, 0.75, 0.0]], dtype=torch.float64).log()
    assert full.kl_of_logits(logits, reference).item() == pytest.approx(0.143841, abs=1e-6)
    # The reference cannot draw what the policy does: infinitely far, and said so.
    assert full.kl_of_logits(logits, torch.tensor([[0.0, -inf, 0.0]])).item() == inf


def test_full_refuses_sampled_tokens_and_the_others_refuse_logits() -> None:
    with pytest.raises(RunError, match="logits of both policies"):
        kl_values("full", POLICY, REFERENCE)
    with pytest.raises(RunError, match="k1.*sampled tokens"):
        MANAGER.build(KlEstimator, "k1").kl_of_logits(POLICY[None], REFERENCE[None])


@pytest.mark.parametrize("fields", [{"input_clamp": 0.0}, {"output_clamp": -1.0}])
def test_clamps_are_positive(fields: dict[str, float]) -> None:
    for name in ("k3", "k3+", "k3_is"):
        with pytest.raises(ConfigError, match="clamp"):
            MANAGER.build(KlEstimator, name, fields)
