"""Penalties on length and repetition, sums of reward terms, and weights to resample by."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.math.shaping import (
    repetition_penalty,
    resampling_weights,
    soft_overlong,
)


def overlong(lengths: list[int], **fields: float | None) -> list[float]:
    settings = {"max_length": 20480, "cache": 4096, **fields}
    return soft_overlong(torch.tensor(lengths), **settings).tolist()  # type: ignore[arg-type]


def test_the_numbers_of_dapo() -> None:
    lengths = [0, 16384, 16385, 17408, 18432, 19456, 20479, 20480, 20481]
    wanted = [0, 0, -0.000244140625, -0.25, -0.5, -0.75, -0.999755859375, -1, -1]
    assert overlong(lengths) == wanted
    assert overlong(lengths, factor=0.5) == [0.5 * value for value in wanted]


def test_without_a_floor_the_line_goes_on() -> None:
    assert overlong([20480, 24576], floor=None) == [-1.0, -2.0]
    assert overlong([24576], floor=-1.5) == [-1.5]


def test_without_a_cache_it_is_a_step() -> None:
    assert overlong([20479, 20480, 20481, 99999], cache=0) == [0.0, 0.0, -1.0, -1.0]
    with pytest.raises(ValueError, match="cache is 30000"):
        overlong([1], cache=30000)


@given(st.integers(0, 100), st.integers(1, 100), st.floats(0.1, 3))
def test_the_penalty_never_rises_with_the_length_and_stays_in_its_range(
    start: int, cache: int, factor: float
) -> None:
    lengths = torch.arange(0, 300)
    got = soft_overlong(lengths, max_length=start + cache, cache=cache, factor=factor)
    assert (got.diff() <= 0).all() and got[start].item() == 0
    assert got.min().item() == pytest.approx(-factor)
    # Continuous: no step is larger than one token's share.
    assert got.diff().abs().max().item() <= factor / cache * (1 + 1e-9)


def test_repetition_counts_distinct_n_grams() -> None:
    responses = [[1, 2, 3, 4], [1, 1, 1, 1, 1], [1, 2, 1, 2, 1, 2], [7, 8], []]
    got = repetition_penalty(responses)
    assert got.tolist() == pytest.approx([0, -(1 - 1 / 3), -(1 - 2 / 4), 0, 0])
    assert repetition_penalty(responses, penalty=0.5).tolist() == pytest.approx((got / 2).tolist())
    assert repetition_penalty(responses, ngram=2)[3].item() == 0
    assert repetition_penalty([[5, 5, 5]], ngram=1).item() == pytest.approx(-2 / 3)


def test_resampling_weights() -> None:
    rewards = torch.tensor([2.0, -3.0, 0.5, 2.0], dtype=torch.float64)
    tiny = 1e-8
    for method, wanted in (
        ("max_min", [1, 1, 0, 1]),
        ("max_random", [0.4, 0.1, 0.1, 0.4]),
        ("pow", [4, 9, 0.25, 4]),
    ):
        got = resampling_weights(rewards, method, 2.0)  # type: ignore[arg-type]
        assert got.tolist() == pytest.approx([value + tiny for value in wanted])
        assert (got > 0).all()
