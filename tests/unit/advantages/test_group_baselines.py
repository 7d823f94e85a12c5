"""Estimators with one number per response: worked examples and what sets them apart."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.contracts import AdvantageEstimator, Aggregator, Counts
from tests.helpers.advantages import MANAGER, estimate, outcome_batch, per_row

# Two right answers of 2 and 6 tokens and a wrong one of 6.
REWARDS, LENGTHS = [1.0, 1.0, -1.0], [2, 6, 6]
rewards_lists = st.lists(st.floats(-5, 5), min_size=2, max_size=8)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dr_grpo", [2 / 3, 2 / 3, -4 / 3]),
        ("rloo", [1.0, 1.0, -2.0]),
        ("opo", [6 / 7, 6 / 7, -8 / 7]),
        ("max_rl", [2.0, 2.0, -4.0]),
        ("optimal_value", [0.198174, 0.198174, -1.801826]),
        ("gpg", [2 / 3, 2 / 3, -4 / 3]),
        ("raw", [1.0, 1.0, -1.0]),
        ("reinforce_baseline", [2 / 3, 2 / 3, -4 / 3]),
    ],
)
def test_two_right_and_one_wrong(name: str, expected: list[float]) -> None:
    batch = outcome_batch(REWARDS, lengths=LENGTHS)
    got = estimate(name, batch).advantages
    wanted = torch.tensor(expected).double()[:, None].expand(got.shape) * batch.mask
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)


def test_a_shared_prefix_is_not_weakened_by_its_wrong_continuations() -> None:
    """Three answers share three tokens; the first, shorter one is right (seed claim, refuted)."""
    batch = outcome_batch([1.0, 0.0, 0.0], lengths=[10, 11, 11])
    advantages = estimate("dr_grpo", batch).advantages
    assert advantages[:, 0].tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3])

    def net_weight(aggregator: str) -> float:
        weights = MANAGER.build(Aggregator, aggregator).weights(batch.mask, Counts.of(batch.mask))
        return float((weights * advantages)[:, 0].sum())

    assert net_weight("token-mean") == pytest.approx(0.0, abs=1e-12)
    assert net_weight("seq-mean-token-mean") == pytest.approx(0.002020, abs=1e-6)


@given(rewards_lists)
def test_rloo_is_dr_grpo_times_g_over_g_minus_one(rewards: list[float]) -> None:
    size = len(rewards)
    centred = [size / (size - 1) * x for x in per_row("dr_grpo", rewards)]
    assert per_row("rloo", rewards) == pytest.approx(centred, abs=1e-9)


@given(rewards_lists)
def test_rloo_compares_each_response_with_the_mean_of_the_others(rewards: list[float]) -> None:
    others = [(sum(rewards) - r) / (len(rewards) - 1) for r in rewards]
    wanted = [r - b for r, b in zip(rewards, others, strict=True)]
    # Rewards within the tolerance count as equal.
    assert per_row("rloo", rewards) == pytest.approx(wanted, abs=2e-5)


def test_opo_without_any_token_takes_the_plain_mean() -> None:
    batch = outcome_batch(REWARDS, lengths=[0, 0, 0])
    assert estimate("opo", batch).advantages.abs().sum() == 0
    estimator = MANAGER.build(AdvantageEstimator, "opo")
    got = estimator.group_advantages(torch.tensor(REWARDS).double(), torch.arange(3), batch)  # type: ignore[attr-defined]
    assert got.tolist() == pytest.approx([2 / 3, 2 / 3, -4 / 3])


def test_opo_lengths_are_those_of_the_response_although_a_row_takes_no_loss() -> None:
    batch = outcome_batch(REWARDS, lengths=LENGTHS)
    filtered = batch.with_columns(mask=batch.mask * torch.tensor([[1.0], [0.0], [1.0]]))
    got = estimate("opo", filtered).advantages
    assert got[:, 0].tolist() == pytest.approx([6 / 7, 0.0, -8 / 7])


@pytest.mark.parametrize("rewards", [[-1.0, -1.0, 1.0], [0.0, -1.0, 1.0], [-3.0, 0.0, 0.0]])
def test_max_rl_has_no_unit_when_the_mean_is_not_positive(rewards: list[float]) -> None:
    assert per_row("max_rl", rewards) == [0.0, 0.0, 0.0]


def test_max_rl_gives_a_rare_success_its_odds() -> None:
    assert per_row("max_rl", [1.0] + [0.0] * 7) == pytest.approx([7.0] + [-1.0] * 7)


# --- gpg --------------------------------------------------------------------------------------


def test_gpg_undoes_the_dilution_by_groups_without_signal() -> None:
    rewards, groups = [1.0, -1.0, 1.0, 1.0, 2.0], [0, 0, 1, 1, 2]
    # Two of five responses are in a group that teaches: alpha is 2.5.
    assert per_row("gpg", rewards, groups) == pytest.approx([2.5, -2.5, 0.0, 0.0, 0.0])
    # As verl counts: all five rewards are not 0, so alpha is 1; the group of one keeps its reward.
    compat = per_row("gpg", rewards, groups, verl_compat=True)
    assert compat == pytest.approx([1.0, -1.0, 0.0, 0.0, 2.0])


def test_gpg_counts_scored_responses_only() -> None:
    batch = outcome_batch(
        [1.0, -1.0, 9.0, 0.0, 0.0], [0, 0, 0, 1, 1], scored=[True, True, False, True, True]
    )
    got = estimate("gpg", batch).advantages[:, 0].tolist()
    assert got == pytest.approx([2.0, -2.0, 0.0, 0.0, 0.0])


def test_gpg_divides_by_f_norm_or_by_the_deviation() -> None:
    assert per_row("gpg", [1.0, -1.0], f_norm=4.0) == pytest.approx([0.25, -0.25])
    by_std = per_row("gpg", [1.0, -1.0], norm_by_std=True, eps=0.0)
    assert by_std == pytest.approx([0.5**0.5, -(0.5**0.5)])


def test_gpg_without_any_signal_is_zero() -> None:
    assert per_row("gpg", [1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1]) == [0.0] * 4


# --- reinforce_pp_baseline --------------------------------------------------------------------


def test_reinforce_pp_baseline_whitens_over_tokens_or_over_responses() -> None:
    batch = outcome_batch(REWARDS, lengths=LENGTHS)
    taken = batch.mask.bool()
    by_tokens = estimate("reinforce_pp_baseline", batch).advantages[taken]
    assert by_tokens.mean().item() == pytest.approx(0.0, abs=1e-12)
    assert by_tokens.std().item() == pytest.approx(1.0, abs=1e-6)
    by_rows = estimate("reinforce_pp_baseline", batch, whiten="sequences").advantages[:, 0]
    std = torch.tensor(REWARDS).std().item() + 1e-4
    assert by_rows.tolist() == pytest.approx([2 / 3 / std, 2 / 3 / std, -4 / 3 / std])


def test_reinforce_pp_baseline_unwhitened_is_dr_grpo() -> None:
    got = per_row("reinforce_pp_baseline", REWARDS, whiten="off")
    assert got == per_row("dr_grpo", REWARDS)
