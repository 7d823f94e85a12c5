"""The interval of a share whose trials come in clusters: by hand, coverage."""

from __future__ import annotations

import numpy as np
import pytest

from posttrain.core.math.intervals import clustered_share, tallied, wilson


def test_pairs_are_counted_by_their_prompts() -> None:
    found = tallied(["b", "a", "b", "b"], [True, False, False, True])
    assert found == [(2, 3), (0, 1)]


def test_trials_that_agree_within_their_cluster_count_once() -> None:
    """By hand: with 11 clusters all right or all wrong the design effect is 4 x 11 / 10."""
    whole = [(4, 4)] * 6 + [(0, 4)] * 5
    alone = [(1, 1)] * 6 + [(0, 1)] * 5  # and of clusters of one trial it is 11 / 10
    assert clustered_share(whole) == pytest.approx(clustered_share(alone), abs=1e-12)
    share, low, high = clustered_share(whole)
    least, most = wilson(6, 11)
    assert low < least < share < most < high, "10 trials say a little less than 11"


def test_clusters_that_all_have_the_same_share_know_as_much_as_single_trials() -> None:
    assert clustered_share([(2, 4)] * 10) == pytest.approx((0.5, *wilson(20, 40)), abs=1e-12)


@pytest.mark.parametrize("right", [0, 3])
def test_with_nothing_to_tell_clusters_apart_each_counts_as_one(right: int) -> None:
    share, low, high = clustered_share([(right, 3)] * 8)
    least, most = wilson(8 * bool(right), 8)
    assert (share, low, high) == pytest.approx((float(bool(right)), least, most), abs=1e-12)


def test_one_cluster_says_as_much_as_one_trial() -> None:
    """By hand, with z = 1.96 and n = 1: the middle is (0.75 + z^2 / 2) / (1 + z^2)."""
    assert clustered_share([(30, 40)]) == pytest.approx((0.75, 0.1179, 0.9854), abs=1e-4)


def test_the_interval_holds_the_truth_as_often_as_it_says_and_that_of_single_trials_does_not() -> (
    None
):
    draw = np.random.default_rng(0)
    covered = {"clusters": 0, "single": 0}
    for _ in range(1_000):
        rates = draw.beta(1.6, 0.4, size=50)  # a prompt's own share; 0.8 over all prompts
        counts = draw.integers(1, 6, size=50)
        clusters = [(int(draw.binomial(n, p)), int(n)) for n, p in zip(counts, rates, strict=True)]
        _, low, high = clustered_share(clusters)
        covered["clusters"] += low <= 0.8 <= high
        right, total = (sum(values) for values in zip(*clusters, strict=True))
        low, high = wilson(right, total)
        covered["single"] += low <= 0.8 <= high
    assert 930 <= covered["clusters"] <= 975
    assert covered["single"] < 900


def test_no_trial_has_no_share() -> None:
    with pytest.raises(ValueError, match="no trial"):
        clustered_share([])
