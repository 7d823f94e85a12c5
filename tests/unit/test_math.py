"""Masks, groups, intervals, splits and numbers in text."""

from __future__ import annotations

import math

import pytest
import scipy
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.kit.batches import build_batch
from posttrain.core.math import groups, intervals
from posttrain.core.math.masking import mask_weights, masked, row_sums
from posttrain.core.math.numbers import is_number, numbers_in, same_number
from posttrain.core.math.splits import loose_key, split_of, stable_hash, text_key

NAN = float("nan")


def test_masked_values_and_gradients_ignore_what_is_under_the_mask() -> None:
    x = torch.tensor([[1.0, NAN], [float("inf"), 2.0]], requires_grad=True)
    mask = torch.tensor([[1, 0], [0, 1]])
    safe = masked(x, mask)
    safe.exp().sum().backward()
    assert safe.tolist() == [[1.0, 0.0], [0.0, 2.0]]
    assert x.grad is not None
    assert x.grad[0, 1].item() == x.grad[1, 0].item() == 0.0
    assert x.grad.diagonal().tolist() == pytest.approx([math.e, math.exp(2)])


def test_row_sums_are_float64_and_zero_for_an_empty_row() -> None:
    sums = row_sums(torch.tensor([[0.1, NAN], [NAN, NAN]]), torch.tensor([[1, 0], [0, 0]]))
    assert sums.dtype == torch.float64
    assert sums.tolist() == [pytest.approx(0.1), 0.0]


def test_a_boolean_mask_becomes_float64_weights_and_a_float_mask_stays() -> None:
    assert mask_weights(torch.tensor([[True, False]])).dtype == torch.float64
    assert mask_weights(torch.ones(1, 1, dtype=torch.float32)).dtype == torch.float32


def test_outcome_rewards_sum_over_the_response_and_not_over_the_loss_mask() -> None:
    batch = build_batch(
        [[0, 0], [1, 0]],
        response_mask=torch.tensor([[1, 1], [1, 0]]),
        token_rewards=torch.tensor([[0.25, 1.0], [0.5, NAN]]),
    )
    assert groups.outcome_rewards(batch).tolist() == [1.25, 0.5]


def test_scored_groups_hold_scored_rows_wherever_they_stand() -> None:
    found = groups.scored_groups(
        torch.tensor([7, 3, 7, 3, 9]), torch.tensor([True, True, True, False, False])
    )
    assert [rows.tolist() for rows in found] == [[1], [0, 2]]


@pytest.mark.parametrize(
    ("values", "equal"),
    [([0.7, 0.1 + 0.6], True), ([0.0, 1e-5], False), ([1e6, 1e6 + 0.5], True), ([3.0], True)],
)
def test_values_are_all_equal_up_to_rounding_at_their_own_scale(
    values: list[float], equal: bool
) -> None:
    assert groups.all_equal(torch.tensor(values).double(), 1e-6) is equal


def test_wilson_gives_the_published_interval() -> None:
    # Newcombe 1998 (Statistics in Medicine 17:857), table I, method 3: 81 of 263.
    low, high = intervals.wilson(81, 263)
    assert (low, high) == (pytest.approx(0.2553, abs=5e-5), pytest.approx(0.3662, abs=5e-5))
    assert intervals.wilson(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="successes is 5"):
        intervals.wilson(5, 4)


@given(st.integers(1, 10_000), st.floats(0, 1))
def test_wilson_and_the_quantiles_are_those_of_scipy(total: int, share: float) -> None:
    right = round(share * total)
    wanted = scipy.stats.binomtest(right, total).proportion_ci(0.95, method="wilson")
    assert intervals.wilson(right, total) == pytest.approx((wanted.low, wanted.high), abs=1e-15)
    assert intervals.t_quantile(total) == scipy.stats.t.ppf(0.975, total)
    assert intervals.normal_quantile() == scipy.stats.norm.ppf(0.975)


def test_wilson_is_never_of_zero_width() -> None:
    low, high = intervals.wilson(0, 20)
    assert low == 0.0 and high == pytest.approx(0.1611, abs=5e-5)


def test_mean_interval_is_student_t_over_problems() -> None:
    mean, low, high = intervals.mean_interval([0.2, 0.4, 0.6, 0.8])
    # s = 0.258199, t(0.975, 3) = 3.182446: half width 0.410852.
    assert (mean, low, high) == (
        pytest.approx(0.5),
        pytest.approx(0.5 - 0.410852, abs=1e-6),
        pytest.approx(0.5 + 0.410852, abs=1e-6),
    )


def test_an_interval_of_shares_always_has_a_width() -> None:
    for count in (1, 2, 7, 50):
        for share in (0.0, 0.25, 0.5, 1.0):
            mean, low, high = intervals.share_interval([share] * count)
            assert mean == share and 0 <= low <= share <= high <= 1 and high - low > 0.01
    # Shares of 0 and 1 are counts: Wilson's interval, 0 of 7 is 0 to 35 %.
    assert intervals.share_interval([0.0] * 7)[1:] == intervals.wilson(0, 7)
    assert intervals.share_interval([0.0] * 7)[2] == pytest.approx(0.3543, abs=1e-4)
    assert intervals.share_interval([1.0, 0.0, 1.0])[1:] == intervals.wilson(2, 3)
    # Many different shares: close to the plain t-interval.
    many = [i / 200 for i in range(201)]
    assert intervals.share_interval(many)[1:] == pytest.approx(
        intervals.mean_interval(many)[1:], abs=2e-3
    )
    assert intervals.standard_error([0.5, 0.5, 0.5]) is None
    with pytest.raises(ValueError, match="empty"):
        intervals.share_interval([])


def test_no_difference_of_a_few_problems_is_certain() -> None:
    for count in (1, 3, 7):
        for found in (
            intervals.paired_proportions(0, 0, count),
            intervals.paired_proportions(count, 0, count),
            intervals.paired_means([0.0] * count),
            intervals.newcombe_difference((0, count), (0, count)),
        ):
            difference, low, high = found
            assert -1 <= low <= difference <= high <= 1 and high - low > 0.2


def test_mean_interval_is_cut_to_its_bounds_only_when_it_has_some() -> None:
    assert intervals.mean_interval([0.0, 1.0])[1:] == (0.0, 1.0)
    assert intervals.mean_interval([0.0, 1.0], bounds=None)[2] == pytest.approx(6.853, abs=1e-3)
    assert intervals.mean_interval([0.3]) == (0.3, 0.0, 1.0)
    with pytest.raises(ValueError, match="empty"):
        intervals.mean_interval([])


def test_newcombe_gives_the_published_interval() -> None:
    # Newcombe 1998 (Statistics in Medicine 17:873), table II, method 10: 56/70 minus 48/80.
    difference, low, high = intervals.newcombe_difference(before=(48, 80), after=(56, 70))
    assert difference == pytest.approx(0.2)
    assert (low, high) == (pytest.approx(0.0524, abs=5e-5), pytest.approx(0.3339, abs=5e-5))


def test_newcombe_swaps_sign_when_before_and_after_swap() -> None:
    difference, low, high = intervals.newcombe_difference((56, 70), (48, 80))
    assert (difference, low, high) == (
        pytest.approx(-0.2),
        pytest.approx(-0.3339, abs=5e-5),
        pytest.approx(-0.0524, abs=5e-5),
    )
    with pytest.raises(ValueError, match="totals are 0 and 4"):
        intervals.newcombe_difference((0, 0), (1, 4))


def test_stable_hash_is_sha256_in_every_process() -> None:
    assert f"{stable_hash('a'):064x}".startswith("ca978112ca1bbdca")


@given(st.text(), st.integers(1, 999))
def test_a_key_has_one_split_and_stays_held_out_when_the_share_grows(key: str, share: int) -> None:
    split = split_of(key, share)
    assert split == split_of(key, share)
    if split == "held_out":
        assert split_of(key, min(999, share + 1)) == "held_out"


def test_about_the_asked_share_of_keys_is_held_out() -> None:
    held_out = sum(split_of(f"key {i}", 100) == "held_out" for i in range(10_000))
    assert 900 < held_out < 1100


def test_text_keys_tell_white_space_and_case_apart_but_not_forms_of_unicode() -> None:
    texts = ("What is a?", "What is A?", " What\n is  a? ", "What  is a?", "What is a?\n")
    assert len({text_key(text) for text in texts}) == len(texts)
    assert text_key("e\u0301") == text_key("\u00e9")
    assert loose_key(" What\n is  a? ") == loose_key("What is a?") != loose_key("What is A?")


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("23 + 45 = 68", ["23", "45", "68"]),
        ("23 + 45 = 68.", ["23", "45", "68"]),
        ("45-23=22", ["45", "23", "22"]),
        ("5 - 9 = -4", ["5", "9", "-4"]),
        ("= \u22124", ["-4"]),
        ("1,234 and 2,3", ["1234", "2", "3"]),
        ("68.5 or .5", ["68.5", ".5"]),
        ("**68**, $7, 9%", ["68", "7", "9"]),
        ("none", []),
        ("\u0663", []),
    ],
)
def test_numbers_are_read_as_a_person_would(text: str, numbers: list[str]) -> None:
    assert numbers_in(text) == numbers


def test_numbers_are_compared_by_value() -> None:
    assert same_number("68.0", "68") and same_number("068", "68") and same_number("1,234", "1234")
    assert not same_number("68.5", "68") and not same_number("-68", "68")


@given(st.text(alphabet="0123456789-.,= \u2212x"))
def test_every_number_that_is_read_can_be_compared(text: str) -> None:
    for number in numbers_in(text):
        assert is_number(number) and same_number(number, number)
