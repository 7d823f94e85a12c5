"""Order within groups under old and new rewards, and distributions, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.core.analysis.rescoring import distribution, find_flips, recorded
from posttrain.core.types import Score

GROUPS = torch.tensor([0, 0, 0, 1, 1, 1])
ALL = torch.ones(6, dtype=torch.bool)


def test_pairs_signs_and_equal_groups_are_counted() -> None:
    old = torch.tensor([1.0, 0.5, 0.0, 1.0, 1.0, 1.0])
    new = torch.tensor([0.0, 0.5, 1.0, 1.0, 1.0, 0.0])
    first, second = find_flips(old, new, ALL, GROUPS).groups
    assert (first.pairs, first.flipped, first.tied, first.signs) == (3, 3, 0, 2)
    assert (second.flipped, second.tied, second.was_equal, second.is_equal) == (0, 2, True, False)
    found = find_flips(old, new, ALL, GROUPS)
    assert found.row_flips.tolist() == [2, 2, 2, 0, 0, 0]
    counts = found.counts()
    assert (counts["groups_with_sign_change"], counts["pairs"]) == (1, 6)
    assert (counts["became_equal"], counts["stopped_being_equal"]) == (0, 1)
    back = find_flips(new, old, ALL, GROUPS).counts()
    assert (back["became_equal"], back["stopped_being_equal"]) == (1, 0)


def test_a_row_that_either_could_not_score_is_in_no_pair() -> None:
    old = torch.tensor([1.0, 0.5, 0.0, 1.0, 1.0, 1.0])
    new = -old
    both = torch.tensor([True, False, True, False, False, False])
    found = find_flips(old, new, both, GROUPS)
    assert [(g.rows, g.pairs, g.flipped) for g in found.groups] == [((0, 2), 1, 1)]


def test_rounding_flips_nothing() -> None:
    old = torch.tensor([0.1, 0.1 + 1e-8, 0.3, 0.0, 0.0, 0.0])
    new = torch.tensor([0.1 + 1e-8, 0.1, 0.3, 0.0, 0.0, 0.0])
    assert find_flips(old, new, ALL, GROUPS).counts()["flipped"] == 0
    assert find_flips(old, 10 * new + 5, ALL, GROUPS).counts()["sign_changes"] == 0


def test_failures_are_no_zeros() -> None:
    scores = [Score(0.0), Score(2.0), Score(None, "timeout"), Score(None, "error"), Score(1.0)]
    found = distribution([*scores, Score(None, "unscored"), Score(None, "crashed")])
    assert (found.scored, found.zeros, found.unscored) == (3, 1, 1)
    assert (found.errors, found.timeouts, found.crashes, found.distinct) == (1, 1, 1, 3)
    assert found.mean == pytest.approx(1.0)
    assert found.std == pytest.approx(math.sqrt(2 / 3))
    assert found.quantiles == (0.0, 0.5, 1.0, 1.5, 2.0)
    nothing = distribution(recorded([math.nan]))
    assert (nothing.mean, nothing.quantiles, nothing.unscored) == (None, None, 1)
