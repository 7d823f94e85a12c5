"""Values and gradients of the losses whose ratio is of a whole answer."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from posttrain.core.contracts import SEQUENCE_AGGREGATORS, RolloutCorrection
from posttrain.core.errors import RunError
from posttrain.core.kit.batches import build_batch
from posttrain.core.math.groups import optimal_value
from tests.helpers.losses import (
    MANAGER,
    build_loss,
    objective_of,
    policy_batch,
    token_loss,
    total_and_grad,
)
from tests.unit.policy_losses.test_first_update import MODES

BAND = {"clip_low": 0.2, "clip_high": 0.2}


def row_grad(grad: Tensor, num_tokens: int) -> list[float]:
    """Gradient of the mean over the row's tokens."""
    return (grad[0] / num_tokens).tolist()


def test_two_tokens_under_each_loss() -> None:
    """Ratios 2 and 0.4 of one answer: PPO cuts the first, GSPO takes their geometric mean."""
    ratios = [[2.0, 0.4]]
    ppo, grad = token_loss("ppo_clip", ratios, [[1.0, 1.0]])
    assert -ppo.loss.mean().item() == pytest.approx(0.8)
    assert row_grad(grad, 2) == pytest.approx([0.0, -0.2])
    bad, _ = token_loss("ppo_clip", ratios, [[-1.0, -1.0]])
    assert -bad.loss.mean().item() == pytest.approx(-1.4)
    gspo, grad = token_loss("gspo", ratios, [[1.0, 1.0]], **BAND)
    assert -gspo.loss.mean().item() == pytest.approx(0.894427, abs=1e-6)
    assert row_grad(grad, 2) == pytest.approx([-0.447214, -0.447214], abs=1e-6)
    bad, _ = token_loss("gspo", ratios, [[-1.0, -1.0]], **BAND)
    assert -bad.loss.mean().item() == pytest.approx(-0.894427, abs=1e-6)


def test_gmpo_clips_tokens_and_keeps_the_answer() -> None:
    good, grad = token_loss("gmpo", [[2.0, 0.4]], [[1.0, 1.0]])
    assert -good.loss.mean().item() == pytest.approx(0.772483, abs=1e-6)
    assert row_grad(grad, 2) == pytest.approx([0.0, -0.772483 / 2], abs=1e-6)
    bad, grad = token_loss("gmpo", [[2.0, 0.4]], [[-1.0, -1.0]])
    assert -bad.loss.mean().item() == pytest.approx(-1.157860, abs=1e-6)
    assert row_grad(grad, 2) == pytest.approx([1.157860 / 2, 0.0], abs=1e-6)


def test_rloo_seq_takes_the_product() -> None:
    result, grad = token_loss("rloo_seq", [[1.5, 0.7]], [[1.0, 1.0]])
    assert result.loss[0].tolist() == pytest.approx([-1.05, -1.05])
    assert row_grad(grad, 2) == pytest.approx([-1.05, -1.05])


def test_a_star_po_regresses_the_log_ratio_of_an_answer() -> None:
    """R = 1 of eight rewards with two ones, S - S_ref = 3 over four tokens; beta 1e-3."""
    values = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 0], dtype=torch.float64)
    for beta, wanted in ((0.5, 0.477229), (0.05, 0.930685), (1e6, 0.25)):
        assert optimal_value(values, beta).item() == pytest.approx(wanted, abs=1e-5)
    best = float(optimal_value(values, 0.5))
    new = torch.full((1, 4), 0.75, dtype=torch.float64, requires_grad=True)
    batch = build_batch(
        torch.ones(1, 4),
        ref_logprobs=torch.zeros(1, 4, dtype=torch.float64),
        advantages=torch.full((1, 4), 1 - best, dtype=torch.float64),
    )
    result = build_loss("a_star_po").token_loss(new, batch)
    assert result.loss[0].tolist() == pytest.approx([0.270162] * 4, abs=1e-6)
    (grad,) = torch.autograd.grad(result.loss.mean(), new)
    assert grad[0].tolist() == pytest.approx([-0.001040] * 4, abs=1e-6)
    still = build_loss("a_star_po").token_loss(torch.zeros_like(new), batch)
    assert still.metrics["a_star_po/implied_reward"].tolist() == [0]


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "rloo_seq"])
@pytest.mark.parametrize(
    ("ratio", "advantage", "dead"),
    [(1.5, 1.0, True), (0.5, 1.0, False), (1.5, -1.0, False), (0.5, -1.0, True)],
)
def test_a_clipped_answer_has_no_gradient_at_all(
    name: str, ratio: float, advantage: float, dead: bool
) -> None:
    tokens = [[ratio * 1.1, ratio * 0.9, ratio]]
    result, grad = token_loss(name, tokens, [[advantage] * 3], **BAND)
    assert (grad == 0).all() if dead else (grad != 0).all()
    assert result.metrics["clip/seq_frac"].tolist() == [float(dead)]
    assert result.metrics["clip/frac"][0].tolist() == [float(dead)] * 3


@pytest.mark.parametrize("aggregator", MODES)
def test_gspo_token_is_gspo_when_an_answer_has_one_advantage(aggregator: str) -> None:
    fields = {"clip_low": 0.1, "clip_high": 0.1}
    batch, new = policy_batch(seed=3)
    direct = total_and_grad(objective_of(build_loss("gspo", fields), aggregator), batch, new)
    token = total_and_grad(objective_of(build_loss("gspo_token", fields), aggregator), batch, new)
    torch.testing.assert_close(token, direct, rtol=1e-9, atol=1e-12)
    clipped = (direct[1] == 0).all(dim=1) & batch.mask.bool().any(dim=1)
    assert 1 < clipped.sum() < 5, "the case has no answer that is clipped, or none that is not"


def test_gspo_is_ppo_clip_with_a_ratio_per_answer() -> None:
    batch, new = policy_batch(seed=3)
    fields = {"clip_low": 3e-4, "clip_high": 4e-4, "ratio_level": "sequence"}
    ours = total_and_grad(objective_of(build_loss("ppo_clip", fields)), batch, new)
    torch.testing.assert_close(
        total_and_grad(objective_of(build_loss("gspo")), batch, new), ours, rtol=0, atol=0
    )


def test_one_absurd_token_hardly_moves_a_long_answer() -> None:
    """A token made 1e10 times less likely among a thousand: the answer's ratio is 0.977."""
    ratios = [[1e-10] + [1.0] * 999]
    result, _ = token_loss("gspo", ratios, [[1.0] * 1000])
    assert -result.loss[0, 0].item() == pytest.approx(0.977, abs=1e-3)


def test_gspo_token_caps_the_ratio_from_above_alone() -> None:
    fields = {"log_ratio_max": 1.0, "ratio_clamp": None, "clip_high": 100.0}
    high, grad = token_loss("gspo_token", [[9.0, 9.0]], [[1.0, 1.0]], **fields)
    assert high.loss[0, 0].item() == pytest.approx(-math.e) and not grad.any()
    low, grad = token_loss("gspo_token", [[0.1, 0.1]], [[1.0, 1.0]], **fields)
    assert low.loss[0, 0].item() == pytest.approx(-0.1) and grad.all()


@pytest.mark.parametrize("name", ["gspo", "gmpo", "rloo_seq", "sapo"])
def test_advantages_that_differ_inside_an_answer_are_refused_or_averaged(name: str) -> None:
    level = {"ratio_level": "sequence"} if name == "sapo" else {}
    with pytest.raises(RunError, match="adv_reduce: mean"):
        token_loss(name, [[1.0, 1.0]], [[1.0, 3.0]], **level)
    averaged, grad = token_loss(name, [[1.0, 1.0]], [[1.0, 3.0]], adv_reduce="mean", **level)
    constant, same = token_loss(name, [[1.0, 1.0]], [[2.0, 2.0]], **level)
    torch.testing.assert_close((averaged.loss, grad), (constant.loss, same))
    token_loss("gspo_token", [[1.0, 1.0]], [[1.0, 3.0]])


@pytest.mark.parametrize("name", ["gspo", "gmpo", "rloo_seq"])
def test_losses_of_whole_answers_want_the_mean_over_answers(name: str) -> None:
    assert build_loss(name).allowed_aggregators() == SEQUENCE_AGGREGATORS
    assert build_loss(name, {"allow_any_agg": True}).allowed_aggregators() is None


@pytest.mark.parametrize("name", ["ppo_clip", "sapo"])
def test_a_ratio_per_answer_wants_it_too(name: str) -> None:
    assert build_loss(name).allowed_aggregators() is None
    by_answer = build_loss(name, {"ratio_level": "sequence"})
    assert by_answer.allowed_aggregators() == SEQUENCE_AGGREGATORS


def test_sapo_and_cispo_can_take_the_ratio_of_the_answer() -> None:
    mean = math.sqrt(2.0 * 0.4)
    sapo, grad = token_loss("sapo", [[2.0, 0.4]], [[1.0, 1.0]], ratio_level="sequence")
    gate = 1 / (1 + math.exp(1 - mean))
    assert -sapo.loss[0, 0].item() == pytest.approx(4 * gate)
    assert row_grad(grad, 2) == pytest.approx([-2 * mean * gate * (1 - gate)] * 2)
    _, grad = token_loss("cispo", [[2.0, 0.4]], [[1.0, 1.0]], ratio_level="sequence")
    assert grad[0].tolist() == pytest.approx([-mean, -mean])


def vespo_phi(log_w: float, k: float, decay: float) -> float:
    return math.exp(decay + k * log_w - decay * math.exp(log_w))


def test_vespo_weighs_an_answer_by_its_likelihood_ratio() -> None:
    log_w = math.log(1.2 * 0.9)
    for advantage, k, decay in ((1.0, 2.0, 3.0), (-1.0, 3.0, 2.0)):
        result, grad = token_loss("vespo", [[1.2, 0.9]], [[advantage] * 2])
        phi = vespo_phi(log_w, k, decay)
        assert grad[0].tolist() == pytest.approx([-advantage * phi] * 2)
        assert result.metrics["vespo/phi"].item() == pytest.approx(phi)


@pytest.mark.parametrize("name", ["vespo", "gmpo"])
def test_a_rollout_weight_enters_the_ratio_and_does_not_multiply_the_loss(name: str) -> None:
    loss = build_loss(name)
    assert loss.folds_weights
    new = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
    batch = build_batch(
        [[1, 1, 0]],
        old_logprobs=torch.zeros(1, 3),
        advantages=torch.tensor([[1.0, 1.0, 0.0]], dtype=torch.float64),
        is_weight=torch.tensor([[1.5, 0.6, 0.0]], dtype=torch.float64),
    )
    result = loss.token_loss(new, batch)
    (grad,) = torch.autograd.grad(result.loss.sum(), new)
    if name == "vespo":
        wanted = vespo_phi(math.log(1.5 * 0.6), 2.0, 3.0)
    else:
        wanted = math.sqrt(1.5 * 0.6)
    assert grad[0].tolist() == pytest.approx([-wanted, -wanted, 0.0])
    rejected = batch.with_columns(is_weight=torch.tensor([[1.0, 0.0, 0.0]]).double())
    assert loss.token_loss(new, rejected).loss.abs().max().item() < 1e-6


@pytest.mark.parametrize("name", ["vespo", "gmpo", "ppo_clip", "vanilla_pg"])
def test_a_bypassed_correction_weighs_only_a_loss_without_a_ratio(name: str) -> None:
    batch, new = policy_batch(seed=4)
    batch = batch.with_columns(old_logprobs=batch.rollout_logprobs)
    correction = MANAGER.build(RolloutCorrection, "tis_token")
    loss = build_loss(name)
    plain = total_and_grad(objective_of(loss), batch, new)
    bypassed = objective_of(loss, correction=correction, bypass_old=True)
    weighed = total_and_grad(bypassed, batch, new)
    assert torch.equal(plain[0], weighed[0]) == loss.uses_ratio
    if not loss.uses_ratio:
        weight = (new - batch.rollout_logprobs).exp().clamp(max=2)
        torch.testing.assert_close(weighed[1], plain[1] * weight)


def test_gmpo_takes_masked_entropies_out_of_its_mean() -> None:
    new = torch.tensor([[1.3, 0.9, 1.1]], dtype=torch.float64).log().requires_grad_()
    batch = build_batch(
        torch.ones(1, 3),
        old_logprobs=torch.zeros_like(new),
        advantages=torch.ones_like(new),
        entropy_keep=torch.tensor([[1.0, 0.0, 1.0]]),
    )
    loss = build_loss("gmpo")
    assert loss.folds_entropy_mask
    result = loss.token_loss(new, batch)
    (grad,) = torch.autograd.grad(result.loss.mean(), new)
    mean = math.sqrt(1.3 * 1.1)
    assert result.loss[0].tolist() == pytest.approx([-mean] * 3)
    assert grad[0].tolist() == pytest.approx([-mean / 2, 0.0, -mean / 2])
