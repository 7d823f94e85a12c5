"""Returns over time without a critic: `mc_return`, `reinforce_pp`, `remax`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.kit.batches import build_batch
from posttrain.core.math.masking import close_gaps, reopen_gaps
from posttrain.core.math.returns import rewards_to_go
from tests.helpers.advantages import estimate, outcome_batch

NAN = float("nan")
masks = st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=4)


def test_a_return_is_carried_over_tool_output_neither_discounted_nor_reset() -> None:
    batch = build_batch([[1, 1, 0, 1]], token_rewards=torch.tensor([[0.0, 0.0, NAN, 1.0]]).double())
    got = estimate("mc_return", batch, gamma=0.9)
    assert got.advantages.tolist() == [pytest.approx([0.81, 0.9, 0.0, 1.0])]
    assert got.returns is not None and torch.equal(got.returns, got.advantages)


@given(masks, st.floats(0, 1), st.integers(0, 9))
def test_gaps_do_not_change_returns(mask: list[list[bool]], gamma: float, seed: int) -> None:
    """The returns of a response with gaps are those of the same tokens in a row."""
    noise = torch.Generator().manual_seed(seed)
    response = torch.tensor(mask).double()
    rewards = torch.randn(response.shape, generator=noise, dtype=torch.float64)
    packed = rewards_to_go(close_gaps(rewards, response), close_gaps(response, response), gamma)
    torch.testing.assert_close(
        rewards_to_go(rewards, response, gamma), reopen_gaps(packed, response)
    )


@given(masks)
def test_gaps_close_and_open_again(mask: list[list[bool]]) -> None:
    response = torch.tensor(mask)
    values = torch.arange(1.0, response.numel() + 1).reshape(response.shape)
    packed = close_gaps(values, response)
    for row, kept, front in zip(values, response, packed, strict=True):
        count = int(kept.sum())
        assert front[:count].tolist() == row[kept].tolist() and not front[count:].any()
    assert torch.equal(reopen_gaps(packed, response), torch.where(response, values, 0.0))


def test_an_outcome_reward_reaches_every_token_undiscounted() -> None:
    batch = outcome_batch([0.5, -2.0], lengths=[3, 1])
    got = estimate("mc_return", batch).advantages
    assert got.tolist() == [[0.5, 0.5, 0.5], [-2.0, 0.0, 0.0]]


def test_reinforce_pp_whitens_the_returns_of_all_tokens_and_keeps_the_returns() -> None:
    rewards = torch.tensor([[0.1, -0.2, 1.0], [0.3, NAN, NAN]], dtype=torch.float64)
    batch = build_batch([[1, 1, 1], [1, 0, 0]], token_rewards=rewards)
    got = estimate("reinforce_pp", batch)
    assert got.returns is not None
    assert got.returns.tolist() == [pytest.approx([0.9, 0.8, 1.0]), pytest.approx([0.3, 0.0, 0.0])]
    taken = batch.mask.bool()
    wanted = torch.tensor([0.9, 0.8, 1.0, 0.3], dtype=torch.float64)
    wanted = (wanted - wanted.mean()) / (wanted.var() + 1e-8).sqrt()
    torch.testing.assert_close(got.advantages[taken], wanted)
    population = estimate("reinforce_pp", batch, whiten_ddof=0).advantages[taken]
    assert population.std(correction=0).item() == pytest.approx(1.0, abs=1e-6)


def test_remax_subtracts_the_greedy_answers_reward_from_rewards_to_go() -> None:
    batch = build_batch(
        [[1, 1], [1, 0]],
        group_id=[0, 0],
        token_rewards=torch.tensor([[-0.25, 1.0], [0.0, NAN]]).double(),
        baseline_reward=torch.tensor([0.5, 0.5]),
    )
    got = estimate("remax", batch)
    assert got.advantages.tolist() == [[0.25, 0.5], [-0.5, 0.0]]
    assert got.metrics == {"adv/greedy_unscored_groups": 0.0} and got.returns is None


def test_remax_falls_back_on_the_group_mean_and_says_how_often() -> None:
    greedy = torch.tensor([NAN, NAN, NAN, 2.0, 2.0], dtype=torch.float64)
    batch = outcome_batch(
        [1.0, 0.0, NAN, 3.0, 1.0],
        [0, 0, 0, 1, 1],
        scored=[True, True, False, True, True],
        baseline_reward=greedy,
    )
    got = estimate("remax", batch)
    assert got.advantages[:, 0].tolist() == [0.5, -0.5, 0.0, 1.0, -1.0]
    assert got.metrics == {"adv/greedy_unscored_groups": 1.0}
    assert batch.column("baseline_reward")[0].isnan(), "the batch itself is left alone"


def test_the_mean_that_remax_falls_back_on_counts_an_episode_once() -> None:
    greedy = torch.full((4,), NAN, dtype=torch.float64)
    rows = torch.tensor([0, 0, 0, 1])
    batch = outcome_batch([1.0, 1.0, 1.0, 0.0], [0] * 4, baseline_reward=greedy, episode_id=rows)
    assert estimate("remax", batch).advantages[:, 0].tolist() == [0.5, 0.5, 0.5, -0.5]
