"""The paired sequential test: how often it is wrong with looks at every pair, and what it finds."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from posttrain.core.math.sequential import (
    behind_at_look,
    confidence_sequence,
    first_decision,
    log_wealth,
)

PAIRS, REPEATED = 40, 2000


def simulated(gained: float, lost: float, seed: int) -> list[list[float]]:
    """Repeated series of pairs: +1 with chance `gained`, -1 with chance `lost`, else 0."""
    draw = np.random.default_rng(seed)
    chances = [lost, 1 - gained - lost, gained]
    return draw.choice([-1.0, 0.0, 1.0], size=(REPEATED, PAIRS), p=chances).tolist()


@pytest.mark.parametrize("moved", [0.1, 0.3, 0.5])
def test_equal_variants_are_told_apart_at_most_once_in_twenty(moved: float) -> None:
    wrong = sum(first_decision(d) is not None for d in simulated(moved, moved, seed=1))
    assert wrong / REPEATED <= 0.05


def test_differences_of_seeds_that_are_equal_on_average() -> None:
    draw = np.random.default_rng(2)
    series = np.clip(draw.normal(0, 0.1, size=(REPEATED, PAIRS)), -1, 1).tolist()
    assert sum(first_decision(d) is not None for d in series) / REPEATED <= 0.05


@pytest.mark.parametrize("sign", [1, -1])
def test_a_real_difference_is_found_and_its_sign_is_right(sign: int) -> None:
    series = simulated(*((0.55, 0.05) if sign > 0 else (0.05, 0.55)), seed=3)
    found = [first_decision(d) for d in series]
    assert sum(one is not None for one in found) / REPEATED > 0.9
    assert sum(one is not None and one[1] != sign for one in found) / REPEATED < 0.01
    assert np.mean([one[0] for one in found if one]) < PAIRS * 0.7  # it stops before the end


def test_the_wealth_is_a_fair_game_under_equal_chances() -> None:
    worlds = [list(d) for d in product([-1.0, 0.0, 1.0], repeat=5)]
    assert np.mean([math.exp(log_wealth(d)) for d in worlds]) == pytest.approx(1.0)


def test_the_wealth_of_one_pair_by_hand() -> None:
    bets = [(2 * k + 1) / 64 for k in range(32)]
    by_hand = sum(1 + c * (0.5 - 0.2) / 1.2 for c in bets) / 32
    assert math.exp(log_wealth([0.5], 0.2)) == pytest.approx(by_hand)


def test_the_order_of_pairs_does_not_matter() -> None:
    d = simulated(0.3, 0.1, seed=4)[0]
    assert log_wealth(d) == pytest.approx(log_wealth(sorted(d)))


def test_the_confidence_sequence_holds_the_mean_and_turns_with_the_sign() -> None:
    held = 0
    series = simulated(0.4, 0.1, seed=5)[:200]
    for d in series:
        mean, low, high = confidence_sequence(d)
        assert low <= mean <= high
        held += low <= 0.3 <= high
        turned = confidence_sequence([-value for value in d])
        assert turned == pytest.approx((-mean, -high, -low), abs=1e-9)
    assert held / len(series) >= 0.95


def test_decision_and_confidence_sequence_agree() -> None:
    for d in simulated(0.5, 0.1, seed=6)[:50]:
        found = first_decision(d)
        if found is not None:
            count, sign = found
            _, low, high = confidence_sequence(d[:count])
            assert (low if sign > 0 else -high) >= 0


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
        first_decision(bad)


def test_no_pair_and_no_look_are_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        confidence_sequence([])
    with pytest.raises(ValueError, match="look is 0"):
        behind_at_look([0.0], 0)
    assert first_decision([]) is None
