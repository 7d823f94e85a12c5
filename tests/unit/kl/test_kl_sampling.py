"""What sampled KL estimates do on average, by Monte Carlo with error bars.

Every claim is held to five standard errors of its own sample, and next to each stands a wrong claim
that the same sample refutes, so that the error bars are known to be small enough to say anything.
Estimates: `"k1"`, `"k2"`, `"k3"`, `"k3+"`, `"k3_is"`.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from posttrain.core.contracts import KlEstimator
from posttrain.core.plugin_manager import PluginManager

MANAGER = PluginManager()
NUM_SAMPLES = 400_000
BOUND = 5.0

LOGITS = torch.tensor([0.9, -0.4, 0.2, -1.1, 0.5], dtype=torch.float64)
REFERENCE = torch.tensor([0.1, 0.3, -0.6, 0.2, 0.4], dtype=torch.float64).log_softmax(0)
BEHAVIOUR = torch.tensor([0.4, -0.2, 0.5, -0.8, 0.1], dtype=torch.float64).log_softmax(0)


@cache
def draws(on_policy: bool) -> Tensor:
    """Token ids [N] from the policy, or from an older one."""
    distribution = LOGITS.softmax(0) if on_policy else BEHAVIOUR.exp()
    noise = torch.Generator().manual_seed(20240229)
    return torch.multinomial(distribution, NUM_SAMPLES, replacement=True, generator=noise)


def errors(per_token: Tensor, ids: Tensor, claimed: Tensor) -> float:
    """How many standard errors the mean of `per_token`[ids] is from `claimed`, at the worst entry.

    `per_token` is [V] or [V, K]: a sample's number, or K numbers, depend on its token alone.
    """
    samples = per_token[ids]
    error = samples.std(dim=0) / len(ids) ** 0.5
    off = (samples.mean(dim=0) - claimed).abs()
    # A column without any spread must be right by itself.
    return float(torch.where(error > 0, off / error, off * 1e12).max())


def value_and_slopes(name: str, *, on_policy: bool = True) -> tuple[Tensor, Tensor]:
    """Of each token v: the estimate [V], and its gradient in the logits as a loss [V, V]."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    ratio = None if on_policy else (logprobs - BEHAVIOUR).exp()
    values = MANAGER.build(KlEstimator, name).kl(logprobs, REFERENCE, ratio)
    slopes = [torch.autograd.grad(v, logits, retain_graph=True)[0] for v in values]
    return values.detach(), torch.stack(slopes)


def scores() -> Tensor:
    """Gradient in the logits of each token's log-prob [V, V]."""
    return torch.eye(5, dtype=torch.float64) - LOGITS.softmax(0)


def kl_and_gradient(*, forward: bool = False) -> tuple[Tensor, Tensor]:
    """KL(policy || reference), or the other way round, and its gradient in the logits."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    distribution, gap = (
        (REFERENCE, REFERENCE - logprobs) if forward else (logprobs, logprobs - REFERENCE)
    )
    kl = (distribution.exp() * gap).sum()
    return kl.detach(), torch.autograd.grad(kl, logits)[0]


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_these_values_are_unbiased(name: str) -> None:
    values, _ = value_and_slopes(name)
    kl, _ = kl_and_gradient()
    assert errors(values, draws(True), kl) < BOUND
    assert errors(values, draws(True), 1.05 * kl) > BOUND


def test_the_value_of_k2_is_biased() -> None:
    values, _ = value_and_slopes("k2")
    kl, _ = kl_and_gradient()
    assert errors(values, draws(True), kl) > BOUND
    assert errors(values, draws(True), (LOGITS.softmax(0) * values).sum()) < BOUND


def test_near_the_reference_k3_has_less_variance_than_k1_and_far_below_it_more() -> None:
    k1, k3 = value_and_slopes("k1")[0], value_and_slopes("k3")[0]
    assert k3[draws(True)].var() < 0.5 * k1[draws(True)].var()
    policy = torch.tensor([0.99, 0.01], dtype=torch.float64).log()
    reference = torch.tensor([0.3, 0.7], dtype=torch.float64).log()
    spread = []
    for name in ("k1", "k3"):
        values = MANAGER.build(KlEstimator, name).kl(policy, reference)
        mean = (policy.exp() * values).sum()
        spread.append(float((policy.exp() * (values - mean).square()).sum()))
    assert spread[1] > 10 * spread[0]


def test_k1_as_a_loss_is_noise_around_0() -> None:
    _, slopes = value_and_slopes("k1")
    _, wanted = kl_and_gradient()
    assert errors(slopes, draws(True), torch.zeros(5, dtype=torch.float64)) < BOUND
    assert errors(slopes, draws(True), wanted) > BOUND
    assert slopes.abs().max() > 0.1


@pytest.mark.parametrize("name", ["k2", "k3+"])
def test_these_losses_have_the_gradient_of_the_kl(name: str) -> None:
    _, slopes = value_and_slopes(name)
    assert errors(slopes, draws(True), kl_and_gradient()[1]) < BOUND
    assert errors(slopes, draws(True), kl_and_gradient(forward=True)[1]) > BOUND


def test_k3_as_a_loss_has_the_gradient_of_the_other_kl() -> None:
    _, slopes = value_and_slopes("k3")
    assert errors(slopes, draws(True), kl_and_gradient(forward=True)[1]) < BOUND
    assert errors(slopes, draws(True), kl_and_gradient()[1]) > BOUND


def test_in_the_reward_k1_has_the_gradient_of_the_kl_and_k3_hardly_any() -> None:
    _, wanted = kl_and_gradient()
    _, other = kl_and_gradient(forward=True)
    k1 = value_and_slopes("k1")[0][:, None] * scores()
    k3 = value_and_slopes("k3")[0][:, None] * scores()
    assert errors(k1, draws(True), wanted) < BOUND
    assert errors(k3, draws(True), wanted) > BOUND
    assert errors(k3, draws(True), wanted - other) < BOUND


def test_off_policy_only_the_weighted_k3_has_value_and_gradient_of_the_kl() -> None:
    kl, wanted = kl_and_gradient()
    ids = draws(False)
    weighted, slopes = value_and_slopes("k3_is", on_policy=False)
    assert errors(weighted, ids, kl) < BOUND and errors(slopes, ids, wanted) < BOUND
    for name in ("k3", "k3+"):
        values, slopes = value_and_slopes(name)
        assert errors(values, ids, kl) > BOUND and errors(slopes, ids, wanted) > BOUND
