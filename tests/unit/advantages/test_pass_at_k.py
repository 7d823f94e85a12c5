"""The `pass_at_k` advantage and the statistics of subsets behind it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from posttrain.core.contracts import AdvantageEstimator
from posttrain.core.errors import ConfigError, RunError
from posttrain.core.math import groups as subsets
from tests.helpers.advantages import MANAGER, estimate, outcome_batch, per_row

NAME = "pass_at_k"
value_lists = st.lists(st.integers(-3, 3).map(float), min_size=3, max_size=7)


@pytest.mark.parametrize(
    ("total", "correct", "k", "expected"),
    [(10, 3, 1, 0.3), (10, 3, 5, 0.916667), (16, 4, 8, 0.961538), (4, 2, 3, 1.0), (4, 0, 2, 0.0)],
)
def test_unbiased_pass_at_k(total: int, correct: int, k: int, expected: float) -> None:
    assert subsets.pass_at_k(total, correct, k) == pytest.approx(expected, abs=1e-6)
    product = 1 - math.prod(1 - k / i for i in range(total - correct + 1, total + 1))
    if total - correct >= k:
        assert subsets.pass_at_k(total, correct, k) == pytest.approx(product)


@pytest.mark.parametrize(("total", "correct", "k"), [(4, 1, 5), (4, 5, 2), (4, 1, 0)])
def test_pass_at_k_of_too_few_responses_is_refused(total: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"k is {k}"):
        subsets.pass_at_k(total, correct, k)


# --- expected maxima, by enumeration ----------------------------------------------------------


def mean_best(values: list[float], k: int, *, holding: int | None, without: int | None) -> float:
    picks = [
        pick
        for pick in itertools.combinations(range(len(values)), k)
        if (holding is None or holding in pick) and (without is None or without not in pick)
    ]
    return sum(max(values[i] for i in pick) for pick in picks) / len(picks)


@given(value_lists, st.data())
def test_expected_maxima_are_those_of_all_subsets(values: list[float], data: st.DataObject) -> None:
    size = len(values)
    k = data.draw(st.integers(1, size - 1))
    rewards = torch.tensor(values)
    with_each = [mean_best(values, k, holding=i, without=None) for i in range(size)]
    assert subsets.expected_max_with_each(rewards, k).tolist() == pytest.approx(with_each)
    without = [mean_best(values, k, holding=None, without=i) for i in range(size)]
    assert subsets.expected_max_without_each(rewards, k).tolist() == pytest.approx(without)


def test_large_groups_do_not_overflow() -> None:
    rewards = torch.linspace(0, 1, 2000, dtype=torch.float64)
    got = subsets.expected_max_with_each(rewards, 1000)
    assert got.isfinite().all() and float(got[-1]) == 1.0


# --- max_minus_second -------------------------------------------------------------------------


def test_only_the_best_response_is_rewarded_by_its_lead() -> None:
    assert per_row(NAME, [0.2, 1.0, 0.7]) == pytest.approx([0.0, 0.3, 0.0])
    std = torch.tensor([0.2, 1.0, 0.7]).double().std().item()
    got = per_row(NAME, [0.2, 1.0, 0.7], norm_by_std=True)
    assert got == pytest.approx([0.0, 0.3 / (std + 1e-6), 0.0])


@pytest.mark.parametrize("rewards", [[1.0, 1.0, 0.0], [0.7, 0.7 + 6e-8, 0.0]])
def test_a_tie_for_the_best_teaches_nothing(rewards: list[float]) -> None:
    assert per_row(NAME, rewards, norm_by_std=True) == [0.0, 0.0, 0.0]


# --- analytic ---------------------------------------------------------------------------------


def analytic(verdicts: list[float], k: int, **fields: object) -> list[float]:
    acc = torch.tensor(verdicts)
    batch = outcome_batch(verdicts, acc=acc)
    got = estimate(NAME, batch, variant="analytic", k=k, **fields).advantages[:, 0]
    return [float(x) for x in got]


def test_analytic_by_hand() -> None:
    got = analytic([1.0, 1.0] + [0.0] * 6, k=4)
    assert got == pytest.approx([0.522233] * 2 + [-0.174078] * 6, abs=1e-6)


def test_analytic_with_one_draw_is_the_z_score_of_the_population() -> None:
    verdicts = [1.0, 0.0, 0.0, 1.0, 0.0]
    assert analytic(verdicts, k=1) == pytest.approx(per_row("grpo", verdicts, ddof=0, eps=0.0))


@given(st.integers(2, 12), st.data())
def test_analytic_advantages_sum_to_zero(total: int, data: st.DataObject) -> None:
    correct = data.draw(st.integers(0, total))
    k = data.draw(st.integers(1, total))
    got = analytic([1.0] * correct + [0.0] * (total - correct), k)
    assert sum(got) == pytest.approx(0.0, abs=1e-9)
    if correct == 0 or total - correct < k:  # no draw, or every draw, holds a right one
        assert got == [0.0] * total


def test_analytic_refuses_verdicts_between_right_and_wrong() -> None:
    with pytest.raises(RunError, match=r"verdicts of 0 or 1, but one is 0\.5"):
        analytic([1.0, 0.5, 0.0], k=2)


# --- loo_maxk ---------------------------------------------------------------------------------


def test_loo_maxk_by_hand() -> None:
    got = per_row(NAME, [1.0, 0.0, 0.0, 1.0, 0.5], variant="loo_maxk", k=2)
    wanted = [0.333333, -0.291667, -0.291667, 0.333333, -0.083333]
    assert got == pytest.approx(wanted, abs=1e-6)


@given(value_lists)
def test_loo_maxk_of_one_draw_is_rloo(rewards: list[float]) -> None:
    got = per_row(NAME, rewards, variant="loo_maxk", k=1)
    assert got == pytest.approx(per_row("rloo", rewards), abs=1e-9)


@given(value_lists)
def test_with_the_smaller_baseline_nobody_is_punished(rewards: list[float]) -> None:
    got = per_row(NAME, rewards, variant="loo_maxk", k=2, baseline="minus_one")
    assert min(got) >= -1e-12


@pytest.mark.parametrize("fields", [{}, {"baseline": "minus_one"}])
@pytest.mark.parametrize("k", [2, 3])
def test_loo_maxk_is_unbiased_for_the_gradient_of_the_best_of_k(
    k: int, fields: dict[str, object]
) -> None:
    """By enumeration: four draws from three outcomes, (k / G) sum_i A_i score_i on average."""
    logits = torch.tensor([0.2, -0.5, 0.3], dtype=torch.float64, requires_grad=True)
    rewards, size = [0.0, 1.0, 2.5], 4
    probs = logits.softmax(0)

    def best_of_k() -> Tensor:
        picks = itertools.product(range(3), repeat=k)
        return sum(
            (probs[list(pick)].prod() * max(rewards[i] for i in pick) for pick in picks),
            torch.zeros((), dtype=torch.float64),
        )

    (wanted,) = torch.autograd.grad(best_of_k(), logits, retain_graph=True)
    scores = torch.eye(3, dtype=torch.float64) - probs.detach()
    total = torch.zeros(3, dtype=torch.float64)
    for draw in itertools.product(range(3), repeat=size):
        drawn = [rewards[i] for i in draw]
        advantages = torch.tensor(per_row(NAME, drawn, variant="loo_maxk", k=k, **fields))
        weight = float(probs.detach()[list(draw)].prod()) * k / size
        total += weight * (advantages[:, None] * scores[list(draw)]).sum(0)
    torch.testing.assert_close(total, wanted, rtol=0, atol=1e-6)


# --- sizes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "smallest"),
    [
        ({}, 2),
        ({"variant": "analytic", "k": 4}, 4),
        ({"variant": "analytic", "k": 1}, 2),
        ({"variant": "loo_maxk", "k": 4}, 5),
        ({"variant": "loo_maxk", "k": 4, "baseline": "minus_one"}, 4),
        ({"variant": "loo_maxk", "k": 4, "singleton": "raw"}, 5),
    ],
)
def test_the_smallest_group_depends_on_the_formula(
    fields: dict[str, object], smallest: int
) -> None:
    assert MANAGER.build(AdvantageEstimator, NAME, fields).smallest_group() == smallest


def test_a_group_that_lost_too_many_rows_teaches_nothing_and_is_counted() -> None:
    batch = outcome_batch(
        [1.0, 0.0, 0.5, 1.0, 0.0, 0.0],
        [0, 0, 0, 1, 1, 1],
        scored=[True, True, True, True, True, False],
    )
    got = estimate(NAME, batch, variant="loo_maxk", k=2)
    assert got.advantages[:3].abs().sum() > 0 and got.advantages[3:].abs().sum() == 0
    assert got.metrics == {"group/zero_adv_frac": 0.5, "adv/singleton_groups": 1.0}


def test_a_baseline_of_no_draws_is_refused() -> None:
    with pytest.raises(ConfigError, match="k must be 2 or more"):
        MANAGER.build(
            AdvantageEstimator, NAME, {"variant": "loo_maxk", "k": 1, "baseline": "minus_one"}
        )
