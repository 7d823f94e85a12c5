"""Whitening at the end of an estimator: over tokens, over responses, and what stays out of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.errors import ConfigError
from posttrain.core.kit.batches import build_batch
from posttrain.core.math.masking import whiten_row_means, whiten_rows, whiten_tokens
from tests.helpers.advantages import estimate, outcome_batch, per_row

NAN = float("nan")


@pytest.mark.parametrize(
    ("ddof", "expected"), [(1, [-1.0, 0.0, 1.0]), (0, [-1.224745, 0.0, 1.224745])]
)
def test_one_two_three(ddof: int, expected: list[float]) -> None:
    fields = {"whiten": "tokens", "whiten_ddof": ddof}
    assert per_row("raw", [1.0, 2.0, 3.0], **fields) == pytest.approx(expected, abs=1e-6)
    values = torch.tensor([1.0, 2.0, 3.0]).double()
    rows = whiten_rows(values, torch.ones(3), ddof=ddof, eps=1e-12)
    assert rows.tolist() == pytest.approx(expected, abs=1e-6)


def test_tokens_and_responses_add_their_eps_in_different_places() -> None:
    values = torch.tensor([0.0, 1.0]).double()
    std = 0.5**0.5
    tokens = whiten_tokens(values[:, None], torch.ones(2, 1), eps=0.5)
    assert tokens[:, 0].tolist() == pytest.approx([-0.5 / (std**2 + 0.5) ** 0.5, 0.5])
    rows = whiten_rows(values, torch.ones(2), eps=0.5)
    assert rows.tolist() == pytest.approx([-0.5 / (std + 0.5), 0.5 / (std + 0.5)])


def test_long_responses_weigh_more_over_tokens_but_not_over_responses() -> None:
    batch = outcome_batch([1.0, 0.0], lengths=[3, 1])
    tokens = estimate("raw", batch, whiten="tokens").advantages
    assert tokens[batch.mask.bool()].mean().item() == pytest.approx(0.0, abs=1e-12)
    rows = estimate("raw", batch, whiten="sequences").advantages
    assert float(rows[0, 0] + rows[1, 0]) == pytest.approx(0.0, abs=1e-12)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=6))
def test_row_means_of_constant_rows_are_whitened_as_rows(rewards: list[float]) -> None:
    """A return per token that does not change along the row is one number per response."""
    batch = outcome_batch(rewards, lengths=[1 + i % 3 for i in range(len(rewards))])
    by_token = estimate("mc_return", batch, whiten="sequences").advantages
    by_row = estimate("raw", batch, whiten="sequences").advantages
    torch.testing.assert_close(by_token, by_row, rtol=0, atol=1e-9)


def test_row_means_leave_out_rows_without_tokens() -> None:
    values = torch.tensor([[1.0, 3.0], [4.0, NAN], [NAN, NAN]]).double()
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    got = whiten_row_means(values, mask, eps=0.0)
    std = 2.0**0.5
    assert got.tolist() == [
        pytest.approx([-2 / std, 0.0]),
        pytest.approx([1 / std, 0.0]),
        pytest.approx([0.0, 0.0]),
    ]


@pytest.mark.parametrize("whiten", ["tokens", "sequences"])
def test_fewer_than_two_are_only_centred(whiten: str) -> None:
    assert per_row("raw", [3.0], whiten=whiten) == [0.0]
    nothing = outcome_batch([NAN], scored=[False])
    assert estimate("raw", nothing, whiten=whiten).advantages.tolist() == [[0.0]]


@pytest.mark.parametrize("whiten", ["tokens", "sequences"])
@pytest.mark.parametrize("name", ["raw", "mc_return"])
def test_an_unscored_row_that_is_kept_in_the_loss_stays_zero_and_uncounted(
    name: str, whiten: str
) -> None:
    """As TRL does: such a row is counted by the aggregator, not by the whitening."""
    rewards = torch.tensor([[1.0], [NAN], [2.0]]).double()
    scored = [True, False, True]
    batch = build_batch(torch.ones(3, 1), token_rewards=rewards, scored=scored)
    got = estimate(name, batch, whiten=whiten).advantages[:, 0].tolist()
    half = 0.5**0.5
    assert got == pytest.approx([-half, 0.0, half], abs=2e-4)


@pytest.mark.parametrize("whiten", ["tokens", "sequences"])
def test_equal_advantages_stay_finite(whiten: str) -> None:
    assert per_row("raw", [2.0, 2.0, 2.0], whiten=whiten) == [0.0, 0.0, 0.0]


def test_an_eps_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="whiten_eps"):
        per_row("raw", [1.0], whiten_eps=0.0)


@pytest.mark.parametrize("name", ["mc_return", "raw"])
def test_an_episode_has_one_mean_however_many_branches_it_has(name: str) -> None:
    batch = outcome_batch([1.0, 3.0, 3.0, 3.0], [0, 1, 1, 1])
    batch = batch.with_columns(episode_id=torch.tensor([0, 1, 1, 1]))
    got = estimate(name, batch, whiten="sequences", whiten_eps=1e-9).advantages[:, 0]
    assert got.tolist() == pytest.approx([-(0.5**0.5), *[0.5**0.5] * 3])
