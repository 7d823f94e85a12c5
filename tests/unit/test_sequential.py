"""The paired sequential test: how often it is wrong with looks at every pair, and what it finds."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from posttrain.core.math.sequential import behind_at_look, log_wealth

PAIRS, REPEATED = 40, 2000


def simulated(gained: float, lost: float, seed: int) -> list[list[float]]:
    """Repeated series of pairs: +1 with chance `gained`, -1 with chance `lost`, else 0."""
    draw = np.random.default_rng(seed)
    chances = [lost, 1 - gained - lost, gained]
    return draw.choice([-1.0, 0.0, 1.0], size=(REPEATED, PAIRS), p=chances).tolist()


def is_found(differences: list[float]) -> bool:
    """Whether the wealth ever reaches 1/0.05, with a look after each pair."""
    looks = range(1, len(differences) + 1)
    return any(log_wealth(differences[:count]) >= math.log(20) for count in looks)


@pytest.mark.parametrize("moved", [0.1, 0.3, 0.5])
def test_equal_variants_are_told_apart_at_most_once_in_twenty(moved: float) -> None:
    assert np.mean([is_found(d) for d in simulated(moved, moved, seed=1)]) <= 0.05


def test_differences_of_seeds_that_are_equal_on_average() -> None:
    draw = np.random.default_rng(2)
    series = np.clip(draw.normal(0, 0.1, size=(REPEATED, PAIRS)), -1, 1).tolist()
    assert np.mean([is_found(d) for d in series]) <= 0.05


def test_a_real_difference_is_found_and_its_sign_is_right() -> None:
    assert np.mean([is_found(d) for d in simulated(0.55, 0.05, seed=3)]) > 0.9
    assert np.mean([is_found(d) for d in simulated(0.05, 0.55, seed=3)]) < 0.01


def test_the_wealth_is_a_fair_game_under_equal_chances() -> None:
    worlds = [list(d) for d in product([-1.0, 0.0, 1.0], repeat=5)]
    assert np.mean([math.exp(log_wealth(d)) for d in worlds]) == pytest.approx(1.0)


def test_the_wealth_of_two_pairs_by_hand() -> None:
    bets = [(2 * k + 1) / 64 for k in range(32)]
    by_hand = sum((1 + c * 0.5) * (1 - c * 0.25) for c in bets) / 32
    assert math.exp(log_wealth([0.5, -0.25])) == pytest.approx(by_hand)


def test_the_order_of_pairs_does_not_matter() -> None:
    d = simulated(0.3, 0.1, seed=4)[0]
    assert log_wealth(d) == pytest.approx(log_wealth(sorted(d)))


def test_later_looks_ask_for_more() -> None:
    d = [-1.0] * 6 + [0.0] * 10  # wealth 2^6 / 7 or so
    assert math.exp(log_wealth([-v for v in d])) == pytest.approx(18, abs=3)
    assert not behind_at_look(d, 1)
    sure = [-1.0] * 10
    assert behind_at_look(sure, 1)
    assert not behind_at_look(sure, 20)
    assert not behind_at_look([1.0] * 30, 1)


def test_looks_at_the_same_problems_are_wrong_at_most_once_in_twenty() -> None:
    draw, wrong = np.random.default_rng(7), 0
    for _ in range(500):
        d = draw.choice([-1.0, 0.0, 1.0], size=60, p=[0.2, 0.6, 0.2])
        for look in range(1, 21):  # some answers change from look to look
            d = np.where(draw.random(60) < 0.2, draw.choice([-1.0, 0.0, 1.0], size=60), d)
            if behind_at_look(d.tolist(), look):
                wrong += 1
                break
    assert wrong / 500 <= 0.05


@pytest.mark.parametrize("bad", [[1.5], [math.nan], [0.0, -1.01]])
def test_what_is_no_difference_of_shares_is_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="outside"):
        log_wealth(bad)


def test_no_pair_is_no_wealth_and_no_look_is_refused() -> None:
    assert log_wealth([]) == 0
    with pytest.raises(ValueError, match="look is 0"):
        behind_at_look([0.0], 0)
