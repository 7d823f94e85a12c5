"""The `ppo_clip` loss: values and gradients token by token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from posttrain.core.contracts import PolicyLoss, TokenLoss
from posttrain.core.errors import ConfigError
from posttrain.core.kit.batches import build_batch
from posttrain.core.plugin_manager import PluginManager

NAN = float("nan")
MANAGER = PluginManager()


def run(
    ratios: list[float], advantages: list[float], **fields: object
) -> tuple[TokenLoss, Tensor, Tensor]:
    """Token losses of one row, its summed gradient in the log-probs, and the log-probs [1, T]."""
    loss = MANAGER.build(PolicyLoss, "ppo_clip", fields)
    new = torch.tensor([[math.log(r) for r in ratios]], dtype=torch.float64, requires_grad=True)
    batch = build_batch(
        torch.ones(1, len(ratios)),
        old_logprobs=torch.zeros(1, len(ratios), dtype=torch.float64),
        advantages=torch.tensor([advantages], dtype=torch.float64),
    )
    result = loss.token_loss(new, batch)
    (grad,) = torch.autograd.grad(result.loss.sum(), new)
    return result, grad, new


RATIOS = [0.5, 0.8, 1.0, 1.2, 1.5]


def test_objective_of_good_tokens_is_capped_above_and_of_bad_tokens_below() -> None:
    good, _, _ = run(RATIOS, [1.0] * 5)
    bad, _, _ = run(RATIOS, [-1.0] * 5)
    assert (-good.loss[0]).tolist() == pytest.approx([0.5, 0.8, 1.0, 1.2, 1.2])
    assert (-bad.loss[0]).tolist() == pytest.approx([-0.8, -0.8, -1.0, -1.2, -1.5])


def test_two_tokens_of_one_answer() -> None:
    good, grad, _ = run([2.0, 0.4], [1.0, 1.0])
    assert (-good.loss[0]).tolist() == pytest.approx([1.2, 0.4])
    assert grad[0].tolist() == pytest.approx([0.0, -0.4])
    bad, _, _ = run([2.0, 0.4], [-1.0, -1.0])
    assert (-bad.loss[0]).tolist() == pytest.approx([-2.0, -0.8])


def test_dual_clip_bounds_the_loss_of_bad_tokens_only() -> None:
    ratios = [0.5, 1.0, 2.0, 3.0, 10.0]
    bad, grad, _ = run(ratios, [-1.0] * 5, dual_clip_c=3.0)
    assert (-bad.loss[0]).tolist() == pytest.approx([-0.8, -1.0, -2.0, -3.0, -3.0])
    assert grad[0, 4].item() == 0.0 and grad[0, 2].item() == pytest.approx(2.0)
    good, _, _ = run(ratios, [1.0] * 5, dual_clip_c=3.0)
    plain, _, _ = run(ratios, [1.0] * 5)
    assert torch.equal(good.loss, plain.loss)


def test_on_policy_gradient_is_minus_the_advantage() -> None:
    _, grad, _ = run([1.0, 1.0, 1.0], [3.0, -2.0, 0.0])
    assert grad[0].tolist() == pytest.approx([-3.0, 2.0, 0.0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "dead"),
    [(1.5, 1.0, True), (0.5, 1.0, False), (1.5, -1.0, False), (0.5, -1.0, True)],
)
def test_gradient_dies_only_on_the_clipped_side(ratio: float, advantage: float, dead: bool) -> None:
    _, grad, _ = run([ratio], [advantage])
    assert grad[0, 0].item() == (0.0 if dead else pytest.approx(-ratio * advantage))


@pytest.mark.parametrize(("high", "caps"), [(0.2, (0.012, 1.08)), (0.28, (0.0128, 1.152))])
def test_a_higher_ceiling_leaves_rare_tokens_more_room(
    high: float, caps: tuple[float, float]
) -> None:
    for old, cap in zip((0.01, 0.9), caps, strict=True):
        result, _, _ = run([5.0], [1.0], clip_high=high)
        assert -result.loss[0, 0].item() * old == pytest.approx(cap)


def test_log_ratios_beyond_the_clamp_stay_finite_and_have_no_gradient() -> None:
    result, grad, _ = run([math.exp(25.0)], [-1.0])
    assert result.loss[0, 0].item() == pytest.approx(math.exp(20.0))
    assert grad[0, 0].item() == 0.0
    free, free_grad, _ = run([math.exp(25.0)], [-1.0], ratio_clamp=None)
    assert free.loss[0, 0].item() == pytest.approx(math.exp(25.0))
    assert free_grad[0, 0].item() == pytest.approx(math.exp(25.0))


def test_masked_tokens_have_no_loss_and_no_gradient_whatever_they_hold() -> None:
    loss = MANAGER.build(PolicyLoss, "ppo_clip", {"dual_clip_c": 3.0})
    new = torch.tensor([[0.1, NAN, float("inf")]], requires_grad=True)
    batch = build_batch(
        [[1, 0, 0]],
        old_logprobs=torch.tensor([[0.0, NAN, 1.0]]),
        advantages=torch.tensor([[1.0, NAN, 2.0]]),
    )
    result = loss.token_loss(new, batch)
    (grad,) = torch.autograd.grad(result.loss.sum(), new)
    assert result.loss[0, 1:].tolist() == [0.0, 0.0]
    assert grad[0].tolist() == [pytest.approx(-math.exp(0.1)), 0.0, 0.0]
    assert all(value[0, 1:].tolist() == [0.0, 0.0] for value in result.metrics.values())


def test_metrics_tell_which_tokens_were_clipped() -> None:
    result, _, _ = run([1.5, 0.5, 4.0, 1.5, 1.0], [1.0, -1.0, -1.0, -1.0, 0.0], dual_clip_c=3.0)
    metrics = {name: value[0].tolist() for name, value in result.metrics.items()}
    assert metrics["clip/high_frac"] == [1, 0, 0, 0, 0]
    assert metrics["clip/low_frac"] == [0, 1, 0, 0, 0]
    assert metrics["clip/dual_frac"] == [0, 0, 1, 0, 0]
    assert metrics["ratio"] == pytest.approx([1.5, 0.5, 4.0, 1.5, 1.0])
    assert metrics["kl/old_k1"][0] == pytest.approx(-math.log(1.5))
    assert metrics["kl/old_k3"][1] == pytest.approx(0.5 - 1 - math.log(0.5))
    assert not any(value.requires_grad for value in result.metrics.values())


@given(st.floats(0.05, 20), st.floats(-3, 3))
def test_without_bounds_it_is_plain_importance_sampling(ratio: float, advantage: float) -> None:
    result, grad, _ = run([ratio], [advantage], clip_low=1.0, clip_high=1000)
    assert result.loss[0, 0].item() == pytest.approx(-ratio * advantage)
    assert grad[0, 0].item() == pytest.approx(-ratio * advantage)


def test_a_dual_clip_of_one_or_less_is_refused() -> None:
    with pytest.raises(ConfigError, match="dual_clip_c"):
        MANAGER.build(PolicyLoss, "ppo_clip", {"dual_clip_c": 1.0})
