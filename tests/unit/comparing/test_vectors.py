"""Vectors and rankings, compared by numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.core.analysis.compare import (
    largest_differences,
    vector_difference,
)
from posttrain.core.analysis.statistics import rank_correlation


def test_cosine_norms_and_signs_of_two_vectors() -> None:
    found = vector_difference(
        torch.tensor([3.0, 4.0, 0.0, 0.0]), torch.tensor([4.0, -3.0, 5.0, 0.0])
    )
    assert found.cosine == pytest.approx(0.0)
    assert found.norm_ratio == pytest.approx(math.sqrt(50) / 5)
    assert found.sign_differs == pytest.approx(2 / 3)  # of three places, the last is 0 in both
    assert found.opposite == pytest.approx(1 / 3)


def test_a_vector_and_its_double_point_the_same_way() -> None:
    vector = torch.tensor([0.1, -0.7, 0.3])
    found = vector_difference(vector, 2 * vector)
    assert found.cosine == pytest.approx(1.0)
    assert (found.norm_ratio, found.sign_differs) == (pytest.approx(2.0), 0.0)


def test_what_does_not_exist_of_a_vector_of_zeros_is_none() -> None:
    found = vector_difference(torch.zeros(3), torch.tensor([1.0, 0.0, 0.0]))
    assert (found.cosine, found.norm_ratio, found.sign_differs) == (None, None, 1.0)
    assert vector_difference(torch.zeros(2), torch.zeros(2)).sign_differs is None


def test_rank_correlation_gives_ties_their_mean_rank() -> None:
    # ranks 1, 2.5, 2.5, 4 and 1, 2, 3, 4: 4.5 / sqrt(4.5 * 5)
    rho = rank_correlation(torch.tensor([1.0, 2.0, 2.0, 9.0]), torch.tensor([0.0, 1.0, 2.0, 3.0]))
    assert rho == pytest.approx(4.5 / math.sqrt(22.5))
    assert rank_correlation(torch.tensor([1.0, 2.0]), torch.tensor([5.0, 4.0])) == -1.0


def test_there_is_no_rank_correlation_without_an_order() -> None:
    assert rank_correlation(torch.ones(4), torch.arange(4.0)) is None
    assert rank_correlation(torch.ones(1), torch.ones(1)) is None


def test_largest_differences_leave_out_equal_places() -> None:
    first, second = torch.tensor([1.0, 0.0, 2.0, 5.0]), torch.tensor([1.5, -3.0, 2.0, 4.0])
    assert largest_differences(first, second, 2) == [1, 3]
    assert largest_differences(first, second, 9) == [1, 3, 0]
