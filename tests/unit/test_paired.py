"""Intervals of paired differences: published and worked examples, coverage, properties."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, stats

from posttrain.core.math.intervals import (
    lost_share,
    newcombe_difference,
    paired_means,
    paired_proportions,
    tango_score,
)

Z = float(stats.norm.ppf(0.975))


@st.composite
def tables(draw: st.DrawFn) -> tuple[int, int, int]:
    total = draw(st.integers(1, 300))
    gained = draw(st.integers(0, total))
    return gained, draw(st.integers(0, total - gained)), total


def test_nothing_gained_or_lost_is_known_to_z_squared_over_n() -> None:
    """By hand: the score is sqrt(n d / (1 - d)), which is z at z^2 / (n + z^2)."""
    for total in (1, 10, 200):
        half = Z * Z / (total + Z * Z)
        assert paired_proportions(0, 0, total) == pytest.approx((0.0, -half, half), abs=1e-9)


def test_only_gains_are_known_as_well_as_wilson_knows_their_share() -> None:
    """By hand: with none lost and all gained, 1 - d plays the part of a share of 0 successes."""
    total = 50
    found = paired_proportions(total, 0, total)
    assert found == pytest.approx((1.0, (total - Z * Z) / (total + Z * Z), 1.0), abs=1e-9)


def test_the_interval_of_the_example_that_papers_on_paired_differences_share() -> None:
    """Newcombe 1998 (table II: 36, 12, 2, 0 of 50 pairs), with the score interval of Tango 1998."""
    assert paired_proportions(12, 2, 50) == pytest.approx((0.2, 0.0611, 0.3447), abs=5e-5)


@given(tables())
def test_at_both_ends_the_score_is_the_normal_quantile(table: tuple[int, int, int]) -> None:
    difference, low, high = paired_proportions(*table)
    assert -1 <= low <= difference <= high <= 1
    for end, sign in ((low, 1), (high, -1)):
        if abs(end) < 1:
            assert tango_score(end, *table) == pytest.approx(sign * Z, abs=1e-5)


@given(tables(), st.floats(-0.95, 0.95))
def test_the_share_of_lost_problems_is_the_likeliest_one(
    table: tuple[int, int, int], delta: float
) -> None:
    """Found again by a search over the likelihood that knows nothing of the closed form."""
    gained, lost, total = table

    def surprise(share: float) -> float:
        shares = (share + delta, share, 1 - delta - 2 * share)
        counts = (gained, lost, total - gained - lost)
        return -sum(n * math.log(max(p, 1e-300)) for n, p in zip(counts, shares, strict=True) if n)

    bounds = (max(0.0, -delta), (1 - delta) / 2)
    best = optimize.minimize_scalar(surprise, bounds=bounds, method="bounded").fun
    ours = min(max(lost_share(delta, gained, lost, total), bounds[0]), bounds[1])
    assert surprise(ours) <= best + 1e-6 * max(1.0, abs(best))


@given(tables())
def test_which_model_comes_first_only_turns_the_sign(table: tuple[int, int, int]) -> None:
    gained, lost, total = table
    there, back = paired_proportions(gained, lost, total), paired_proportions(lost, gained, total)
    assert there == pytest.approx((-back[0], -back[2], -back[1]), abs=1e-9)


@pytest.mark.parametrize(("gain", "loss"), [(0.0, 0.0), (0.1, 0.1), (0.3, 0.1), (0.02, 0.01)])
def test_the_interval_holds_the_truth_as_often_as_it_says(gain: float, loss: float) -> None:
    """Exactly, over all outcomes of 40 problems; score intervals waver a little around 95 %."""
    total, covered = 40, 0.0
    for gained in range(total + 1):
        for lost in range(total + 1 - gained):
            chance = stats.multinomial.pmf(
                [gained, lost, total - gained - lost], total, [gain, loss, 1 - gain - loss]
            )
            if chance > 1e-7:
                _, low, high = paired_proportions(gained, lost, total)
                covered += chance * (low <= gain - loss <= high)
    assert covered > 0.93


def test_pairing_sees_what_independent_samples_would_not() -> None:
    """150 of 200 right before, 160 after, no problem lost: sure only problem by problem."""
    assert paired_proportions(10, 0, 200)[1] > 0
    assert newcombe_difference((150, 200), (160, 200))[1] < 0


@pytest.mark.parametrize("table", [(-1, 0, 5), (3, 3, 5), (0, 0, 0)])
def test_counts_that_cannot_be_are_refused(table: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="expected counts"):
        paired_proportions(*table)


def test_means_of_shares_by_hand() -> None:
    """0.5 and 0.1 and the two that are added: mean 0.15, s^2 = 2.17 / 3, t(3) = 3.1824."""
    mean, low, high = paired_means([0.5, 0.1])
    half = 3.182446 * math.sqrt((0.35**2 + 0.05**2 + 1.15**2 + 0.85**2) / 3 / 4)
    assert mean == pytest.approx(0.3)
    assert (low, high) == pytest.approx((max(-1.0, 0.15 - half), min(1.0, 0.15 + half)), abs=1e-6)
    assert low == -1.0, "two problems say nothing"


def test_many_equal_gains_are_sure_and_one_alone_is_not() -> None:
    assert paired_means([0.1] * 400)[1] > 0
    assert paired_means([1.0])[1] == -1.0
    with pytest.raises(ValueError, match="empty"):
        paired_means([])


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=60))
def test_the_interval_of_means_has_a_width_and_holds_the_mean(values: list[float]) -> None:
    mean, low, high = paired_means(values)
    assert -1 <= low <= mean + 1e-12 and mean - 1e-12 <= high <= 1
    assert high - low > 0.01
