"""Losses without a reference, and losses of labelled answers, against worked examples."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from posttrain.core.contracts import LabelledScores, LabelLoss, PairLoss, PairScores
from posttrain.core.errors import RunError
from posttrain.core.math.preference import alpha_shape
from tests.helpers.preference import MANAGER, column, gradients, pair_loss, pairs

ratios = st.floats(-5, 5)

# --- without a reference --------------------------------------------------------------------------


def test_sft_averages_over_tokens_and_not_over_answers() -> None:
    loss = MANAGER.build(PairLoss, "sft")
    made = pairs(column(0, 0), column(0, 0))
    made = replace(made, chosen_nll=column(2.0, 30.0), num_chosen_tokens=16.0)
    assert loss.pair_loss(made).mean().item() == pytest.approx(32 / 16)


def test_cpo_is_dpo_of_bare_log_probs_beside_sft() -> None:
    # Sequence log-probs -3 + 1 and -4 + 2.5.
    bare = math.log1p(math.exp(-0.1 * (-2.0 + 1.5)))
    assert pair_loss("cpo", 1.0, 2.5, cpo_alpha=0.0) == pytest.approx(bare)
    assert pair_loss("cpo", 1.0, 2.5, cpo_alpha=3.0) == pytest.approx(bare + 3 * 2.0 / 4)


def test_simpo_averages_over_tokens_and_asks_for_a_margin() -> None:
    gap = 2 * (-2.0 / 4 + 1.5 / 5) - 0.5
    assert pair_loss("simpo", 1.0, 2.5) == pytest.approx(math.log1p(math.exp(-gap)))
    nearly = pair_loss("simpo", 1.0, 2.5, alpha_po=1e-6)
    assert nearly == pytest.approx(pair_loss("simpo", 1.0, 2.5), rel=1e-5)
    shaped = [(1 - math.exp(-0.5 * mean)) / 0.5 for mean in (-2.0 / 4, -1.5 / 5)]
    gap = 2 * (shaped[0] - shaped[1]) - 0.5
    assert pair_loss("simpo", 1.0, 2.5, alpha_po=0.5) == pytest.approx(math.log1p(math.exp(-gap)))


def test_alpha_po_by_hand() -> None:
    """Mean log-probs -0.7 and -1.1 at alpha 0.25 and -0.5, without a reference."""
    made = pairs(column(-1.4), column(-3.3), ref=(0.0, 0.0), tokens=(2.0, 3.0))
    for alpha, wanted in ((0.25, (-0.764985, -1.266123)), (-0.5, (-0.590624, -0.846100))):
        scores = [score.item() for score in made.alpha_scores(alpha)]
        assert scores == pytest.approx(wanted, abs=1e-6)
    means = torch.tensor([-0.7, -1.1], dtype=torch.float64, requires_grad=True)
    (slopes,) = torch.autograd.grad(alpha_shape(means, 0.25).sum(), means)
    assert slopes.tolist() == pytest.approx([1.191246, 1.316531], abs=1e-6)
    for alpha, wanted_loss in ((0.25, 0.312497), (0.0, 0.386871)):
        loss = MANAGER.build(PairLoss, "simpo", {"beta": 2.5, "gamma": 0.25, "alpha_po": alpha})
        assert loss.pair_loss(made).item() == pytest.approx(wanted_loss, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "plain"), [("hinge", {}), ("ipo", {"norm": "mean"}), ("cpo", {"cpo_alpha": 0.0})]
)
def test_a_small_alpha_po_is_the_mean_log_ratio(name: str, plain: dict[str, object]) -> None:
    """One token an answer: the mean is the sum, and the reference's score is taken off."""
    made = pairs(column(0.3, 2.0), column(0.1, -0.4), tokens=(1.0, 1.0))
    shaped = MANAGER.build(PairLoss, name, {**plain, "alpha_po": 1e-7}).pair_loss(made)
    unshaped = MANAGER.build(PairLoss, name, plain).pair_loss(made)
    assert shaped.tolist() == pytest.approx(unshaped.tolist(), rel=1e-5)


def test_orpo_is_sft_with_an_odds_ratio() -> None:
    def log_odds(mean: float) -> float:
        return math.log(math.exp(mean) / (1 - math.exp(mean)))

    gap = log_odds(-2.0 / 4) - log_odds(-1.5 / 5)
    wanted = 2.0 / 4 + 0.1 * math.log1p(math.exp(-gap))
    assert pair_loss("orpo", 1.0, 2.5) == pytest.approx(wanted)
    loss = MANAGER.build(PairLoss, "orpo")
    found = loss.metrics(pairs(column(1.0), column(2.5)))
    assert found["pref/log_odds"].item() == pytest.approx(gap)


def test_orpo_stays_finite_for_an_answer_of_probability_1() -> None:
    assert all(map(math.isfinite, (*gradients("orpo", 3.0, 0.0), pair_loss("orpo", 3.0, 0.0))))


@pytest.mark.parametrize("name", ["cpo", "simpo", "orpo", "sft", "dpo"])
def test_a_loss_of_log_probs_says_that_a_reward_model_has_none(name: str) -> None:
    loss = MANAGER.build(PairLoss, name, {"sft_coef": 1.0} if name == "dpo" else {})
    with pytest.raises(RunError, match="a reward model has only rewards"):
        loss.pair_loss(PairScores.of_rewards(column(1.0), column(0.0)))


# --- labelled answers -----------------------------------------------------------------------------


def label_loss(
    name: str, scores: Tensor, desirable: list[bool], kl: Tensor | None = None, **fields: object
) -> Tensor:
    loss = MANAGER.build(LabelLoss, name, fields)
    rows = LabelledScores(scores, torch.tensor(desirable), kl)
    return loss.label_loss(rows)


def test_kto_of_the_worked_example() -> None:
    values = label_loss("kto", column(2.0, -1.0), [True, False], kl=column(0.25, 0.75))
    assert values.tolist() == pytest.approx([0.462570, 0.462570], abs=1e-6)


def test_ktos_reference_point_is_never_negative_and_carries_no_gradient() -> None:
    loss = MANAGER.build(LabelLoss, "kto", {"beta": 1.0})
    kl = column(-3.0, 1.0).requires_grad_()
    rows = LabelledScores(column(0.0, 0.0), torch.tensor([True, False]), kl)
    assert loss.prepare(rows).scalars == {"z_ref": 0.0}
    assert loss.label_loss(rows).tolist() == [0.5, 0.5]
    assert not loss.label_loss(replace(rows, kl_scores=kl + 5)).requires_grad


def test_kto_weighs_the_labels_and_pulls_each_its_own_way() -> None:
    scores = column(0.0, 0.0).requires_grad_()
    value = label_loss(
        "kto", scores, [True, False], column(0.0), desirable_weight=2.0, undesirable_weight=3.0
    )
    (grad,) = torch.autograd.grad(value.sum(), scores)
    assert value.tolist() == [1.0, 1.5]
    assert grad.tolist() == pytest.approx([-2 * 0.1 / 4, 3 * 0.1 / 4])


def test_kto_asks_for_mismatched_answers() -> None:
    with pytest.raises(RunError, match="mismatched answers"):
        label_loss("kto", column(0.0), [True])


@given(ratios)
def test_apo_zero_unpaired_is_kto_at_a_reference_point_of_0(score: float) -> None:
    plain = label_loss("apo_zero_unpaired", column(score, score), [True, False])
    kto = label_loss("kto", column(score, score), [True, False], kl=column(-1.0))
    torch.testing.assert_close(plain, kto)
