"""Preference losses against worked examples and the facts that their docstrings state."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from posttrain.core.contracts import (
    PairLoss,
    PairScores,
    PreferenceLoss,
)
from tests.helpers.preference import MANAGER, column, gradients, pair_loss, pairs

LN2 = math.log(2)
ratios = st.floats(-5, 5)


# --- DPO and its relatives ------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.01, 0.1, 1.0, 7.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo_of_a_policy_equal_to_its_reference_is_ln_2_whatever_beta_is(
    beta: float, smoothing: float
) -> None:
    assert pair_loss("dpo", 0, 0, beta=beta, label_smoothing=smoothing) == pytest.approx(LN2)


def test_dpo_falls_although_both_answers_lose_probability() -> None:
    u, v = math.log(0.3 / 0.4), math.log(0.1 / 0.3)
    assert pair_loss("dpo", u, v, beta=0.1) == pytest.approx(0.653423, abs=1e-6)
    assert pair_loss("dpo", u, v, beta=1.0) == pytest.approx(0.367725, abs=1e-6)


def test_label_smoothing_of_the_published_example() -> None:
    assert pair_loss("dpo", 5.0, 0.0, label_smoothing=0.1) == pytest.approx(0.524077, abs=1e-6)


@given(ratios, ratios, st.floats(0.05, 2))
def test_dpo_has_the_gradient_of_the_paper(u: float, v: float, beta: float) -> None:
    wrong = beta / (1 + math.exp(beta * (u - v)))
    assert gradients("dpo", u, v, beta=beta) == (pytest.approx(-wrong), pytest.approx(wrong))


def test_the_additions_to_dpo() -> None:
    plain = pair_loss("dpo", -1.0, -2.0, beta=0.5)
    with_sft = pair_loss("dpo", -1.0, -2.0, beta=0.5, sft_coef=2.0)
    assert with_sft == pytest.approx(plain + 2.0 * 4.0 / 4.0)  # NLL 4 over 4 tokens
    penalised = pair_loss("dpo", -1.0, -2.0, beta=0.5, dpop_lambda=3.0)
    assert penalised == pytest.approx(math.log1p(math.exp(-0.5 * (1.0 - 3.0))))
    assert pair_loss("dpo", 1.0, -2.0, dpop_lambda=3.0) == pair_loss("dpo", 1.0, -2.0)
    normed = pair_loss("dpo", -1.0, -2.0, beta=0.5, length_norm=True)
    assert normed == pytest.approx(math.log1p(math.exp(-0.5 * (-1 / 4 + 2 / 5))))
    offset = MANAGER.build(PairLoss, "dpo", {"beta": 0.5, "margin_coef": 1.0})
    value = offset.pair_loss(pairs(column(-1.0), column(-2.0), margin=0.5))
    assert value.item() == pytest.approx(LN2)


def test_dpop_turns_the_gradient_of_a_falling_chosen_answer_up() -> None:
    down, _ = gradients("dpo", -1.0, -2.0, dpop_lambda=5.0)
    plain, _ = gradients("dpo", -1.0, -2.0)
    assert down < plain < 0


@pytest.mark.parametrize("tau", [0.1, 0.5])
def test_ipo_starts_at_a_quarter_over_tau_squared_and_ends_at_its_gap(tau: float) -> None:
    assert pair_loss("ipo", 0, 0, tau=tau) == pytest.approx(1 / (4 * tau**2))
    assert pair_loss("ipo", 1 / (2 * tau), 0, tau=tau, norm="sum") == pytest.approx(0)
    assert gradients("ipo", 1 / (2 * tau) + 1, 0, tau=tau, norm="sum")[0] == pytest.approx(2)


def test_ipo_of_the_worked_examples() -> None:
    assert pair_loss("ipo", 0, 0) == pytest.approx(25.0)
    assert pair_loss("ipo", 3.0, 0, norm="sum") == pytest.approx(4.0)
    assert pair_loss("ipo", 4.0, -10.0) == pytest.approx((1 + 2 - 5) ** 2)  # per token


def test_hinge_leaves_pairs_alone_that_are_far_enough_apart() -> None:
    assert pair_loss("hinge", 0, 0, beta=0.3) == 1.0
    assert gradients("hinge", 1.0, -1.0, beta=0.25) == pytest.approx((-0.25, 0.25))
    assert gradients("hinge", 3.0, -3.0, beta=0.25) == (0.0, 0.0)


@given(ratios, ratios, st.floats(0, 0.45))
def test_robust_is_dpo_in_expectation_over_swapped_labels(u: float, v: float, e: float) -> None:
    right = pair_loss("robust", u, v, label_smoothing=e)
    swapped = pair_loss("robust", v, u, label_smoothing=e)
    assert (1 - e) * right + e * swapped == pytest.approx(pair_loss("dpo", u, v), abs=1e-9)


def test_sigmoid_norm_does_not_reward_length() -> None:
    loss = MANAGER.build(PairLoss, "sigmoid_norm", {"beta": 2.0})
    short = loss.pair_loss(pairs(column(1.0), column(-1.0), tokens=(4, 5)))
    long = loss.pair_loss(pairs(column(3.0), column(-1.0), tokens=(12, 5)))
    assert short.item() == pytest.approx(long.item())
    assert short.item() == pytest.approx(math.log1p(math.exp(-2 * (1 / 4 + 1 / 5))))


@given(ratios, ratios)
def test_exo_pair_is_a_divergence_with_its_zero_at_the_target(u: float, v: float) -> None:
    e = 0.05
    assert pair_loss("exo_pair", u, v, beta=1.0, label_smoothing=e) >= -1e-12
    target = math.log((1 - e) / e)
    assert pair_loss("exo_pair", target, 0, beta=1.0, label_smoothing=e) == pytest.approx(0)


def test_losses_of_single_answers_at_the_reference_and_their_targets() -> None:
    assert pair_loss("nca_pair", 0, 0) == pair_loss("bco_pair", 0, 0) == pytest.approx(2 * LN2)
    assert gradients("nca_pair", LN2 / 0.1, 0)[0] == pytest.approx(0)
    assert gradients("bco_pair", 1.0, -3.0)[0] == gradients("bco_pair", 1.0, 9.0)[0]
    assert pair_loss("sppo_hard", 0, 0, beta=0.5) == pytest.approx(1 / (2 * 0.5**2))
    assert pair_loss("sppo_hard", 1.0, -1.0, beta=0.5) == 0


def test_apo_pushes_each_answer_its_own_way() -> None:
    assert pair_loss("apo_zero", 0, 0) == pair_loss("apo_down", 0, 0) == pytest.approx(1)
    assert gradients("apo_zero", 0, 0) == pytest.approx((-0.025, 0.025))
    assert gradients("apo_down", 0, 0) == pytest.approx((0, 0.025))
    # Beyond the reference apo_down lowers the chosen answer too.
    assert gradients("apo_down", 1.0, -20.0)[0] > 0


def test_discopop_switches_from_dpo_to_an_exponential() -> None:
    assert pair_loss("discopop", 0, 0) == pytest.approx((LN2 + 1) / 2)
    assert pair_loss("discopop", -30.0, 0) == pytest.approx(pair_loss("dpo", -30.0, 0))
    assert pair_loss("discopop", 30.0, 0) == pytest.approx(math.exp(-3.0))


# --- optimal transport ----------------------------------------------------------------------------


def test_aot_of_pairs_compares_gaps_of_one_rank() -> None:
    loss = MANAGER.build(PairLoss, "aot", {"beta": 0.5})
    batch = PairScores(
        chosen=column(0, 0, 0),
        rejected=column(0, 0, 0),
        margin=column(0, 0, 0),
        chosen_logps=column(5, 1, 3),
        rejected_logps=column(0, 0, 0),
        ref_chosen_logps=column(1, 2, 4),
        ref_rejected_logps=column(0, 0, 0),
    )
    gaps = (5 - 4, 1 - 1, 3 - 2)  # sorted against sorted, in the rows' own order
    wanted = [math.log1p(math.exp(-0.5 * gap)) for gap in gaps]
    assert loss.pair_loss(batch).tolist() == pytest.approx(wanted)


def test_aot_without_pairing_does_not_mind_who_is_paired_with_whom() -> None:
    loss = MANAGER.build(PairLoss, "aot_unpaired", {"label_smoothing": 0.1})
    u, v = column(1.0, -2.0, 0.5), column(0.3, -1.0, 2.0)
    totals = {
        round(loss.pair_loss(pairs(u, v[list(order)])).mean().item(), 12)
        for order in permutations(range(3))
    }
    assert len(totals) == 1


@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
@given(st.lists(st.tuples(ratios, ratios), min_size=2, max_size=6))
def test_aot_is_exact_in_micro_batches(name: str, scores: list[tuple[float, float]]) -> None:
    loss = MANAGER.build(PairLoss, name, {"beta": 0.7, "label_smoothing": 0.1})
    u = column(*(a for a, _ in scores)).requires_grad_()
    v = column(*(b for _, b in scores)).requires_grad_()

    def with_references(index: Tensor) -> PairScores:
        made = pairs(u[index], v[index])
        reference = torch.linspace(-2, 2, len(scores), dtype=torch.float64)[index].square()
        return replace(made, ref_chosen_logps=reference)

    everything = torch.arange(len(scores))
    whole = loss.pair_loss(with_references(everything)).sum()
    plain = sorted_form(name, with_references(everything), 0.7, 0.1)
    prepared = loss.prepare(with_references(everything))
    parts = [
        loss.pair_loss(with_references(part), prepared.rows(part)).sum()
        for part in everything.split(2)
    ]
    split = torch.stack(parts).sum()
    for other in (split, plain):
        torch.testing.assert_close(other, whole)
        for got, wanted in zip(
            torch.autograd.grad(other, (u, v), retain_graph=True),
            torch.autograd.grad(whole, (u, v), retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(got, wanted)


def sorted_form(name: str, batch: PairScores, beta: float, smoothing: float) -> Tensor:
    """The paper's formula, on the whole mini-batch."""
    if name == "aot_unpaired":
        gap = batch.chosen.sort().values - batch.rejected.sort().values
    else:
        (chosen, rejected), (ref_chosen, ref_rejected) = batch.logps(), batch.ref_logps()
        gap = (chosen - rejected).sort().values - (ref_chosen - ref_rejected).sort().values
    log_sigmoid = torch.nn.functional.logsigmoid
    right, wrong = log_sigmoid(beta * gap), log_sigmoid(-beta * gap)
    return (-(1 - smoothing) * right - smoothing * wrong).sum()


# --- all of them ----------------------------------------------------------------------------------

POLICY_PAIR_LOSSES = [
    entry.name
    for entry in MANAGER.entries("preference_loss")
    if issubclass(entry.cls, PairLoss) and "policy" in entry.cls.trains
]


def test_the_specified_losses_are_all_there() -> None:
    wanted = {
        *("bradley_terry", "dpo", "ipo", "kto", "hinge", "robust", "sigmoid_norm", "exo_pair"),
        *("nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "aot", "aot_unpaired"),
        *("discopop", "sft", "cpo", "simpo", "orpo", "apo_zero_unpaired"),
    }
    assert {entry.name for entry in MANAGER.entries("preference_loss")} >= wanted


@pytest.mark.parametrize("name", POLICY_PAIR_LOSSES)
def test_a_loss_falls_as_the_chosen_answer_gains_on_the_rejected_one(name: str) -> None:
    steps = (0.0, 0.05, 0.1, 0.2)
    values = [pair_loss(name, gain, -gain) for gain in steps]
    if name == "discopop":  # not monotone near 0, by design
        values = [pair_loss(name, gain, -gain) for gain in (-20.0, -10.0, 5.0, 20.0)]
    assert values == sorted(values, reverse=True) and values[0] > values[-1]


@pytest.mark.parametrize("name", POLICY_PAIR_LOSSES)
def test_extreme_scores_give_finite_losses_and_gradients(name: str) -> None:
    for u, v in ((-700.0, 700.0), (700.0, -700.0)):
        found = (pair_loss(name, u, v), *gradients(name, u, v))
        assert all(map(math.isfinite, found)), (u, v, found)


@pytest.mark.parametrize("name", [n for n in POLICY_PAIR_LOSSES if not n.startswith("aot")])
def test_a_pair_loss_does_not_depend_on_the_other_pairs(name: str) -> None:
    loss: PreferenceLoss = MANAGER.build(PreferenceLoss, name)  # type: ignore[type-arg]
    assert isinstance(loss, PairLoss)
    u, v = column(1.0, -2.0, 0.5), column(0.3, -1.0, 2.0)
    together = loss.pair_loss(pairs(u, v))
    for i in range(3):
        alone = replace(pairs(u[i : i + 1], v[i : i + 1]), num_pairs=3.0, num_chosen_tokens=12.0)
        torch.testing.assert_close(loss.pair_loss(alone)[0], together[i])
