"""Advantages of turns: `gigpo` and `turn_grpo`, by worked numbers, edges and properties."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.kit.batches import build_batch
from posttrain.core.math.turns import on_tokens, sampled_turns, turn_of_token, turn_returns
from posttrain.core.rewards.shaping import place_on_last_token
from tests.helpers.advantages import estimate

NAN = float("nan")
SIX = {"abs": 4e-6}  # sums of two numbers of six digits, with eps in one


def padded(rows: Sequence[Sequence[float]], pad: float, dtype: torch.dtype) -> Tensor:
    width = max(1, *(len(row) for row in rows))
    return torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows], dtype=dtype)


def turn_batch(
    rewards: Sequence[Sequence[float]],
    states: Sequence[Sequence[int]] | None = None,
    outcomes: Sequence[float] | None = None,
    group_id: Sequence[int] | None = None,
    scored: Sequence[bool] | None = None,
    owned: Sequence[Sequence[bool]] | None = None,
    **columns: Tensor,
) -> RolloutBatch:
    """Rows of turns of one token, each but the last followed by an observation of one token.

    The outcome is the sum of a row's rewards unless given; a turn that is not `owned` has its token
    in another row.
    """
    width = max(1, *(2 * len(row) - 1 for row in rewards))
    mask = torch.zeros(len(rewards), width, dtype=torch.float64)
    for row, given_rewards in enumerate(rewards):
        for turn in range(len(given_rewards)):
            mask[row, 2 * turn] = owned is None or float(owned[row][turn])
    total = [sum(r for r in row if r == r) for row in rewards] if outcomes is None else outcomes
    values = torch.tensor(total, dtype=torch.float64)
    keys = states if states is not None else [list(range(len(row))) for row in rewards]
    return build_batch(
        mask,
        group_id=group_id if group_id is not None else [0] * len(rewards),
        scored=scored,
        rewards=values,
        token_rewards=place_on_last_token(values, mask),
        turn_end=padded([[2 * t for t in range(len(row))] for row in rewards], -1, torch.int64),
        turn_reward=padded(rewards, NAN, torch.float64),
        state_key=padded(keys, 0, torch.int64),
        **columns,
    )


def turns_of(name: str, batch: RolloutBatch, **fields: object) -> list[list[float]]:
    """The advantage on each row's sampled tokens."""
    found = estimate(name, batch, **fields).advantages
    rows = zip(found, batch.mask.bool(), strict=True)
    return [row[own].tolist() for row, own in rows]


# --- which tokens are whose -------------------------------------------------------------------


def test_a_token_is_in_the_turn_that_ends_next() -> None:
    ends = torch.tensor([[0, 3, -1], [4, -1, -1], [-1, -1, -1]])
    turns = turn_of_token(ends, 5)
    assert turns.tolist() == [[0, 1, 1, 1, -1], [0, 0, 0, 0, 0], [-1] * 5]
    values = torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
    assert on_tokens(values, ends, 5).tolist() == [
        [1.0, 2.0, 2.0, 2.0, 0.0],
        [3.0] * 5,
        [0.0] * 5,
    ]
    sampled = torch.tensor([[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [1, 1, 1, 1, 1]])
    assert sampled_turns(ends, sampled).tolist() == [
        [True, False, False],
        [True, False, False],
        [False] * 3,
    ]


def test_returns_go_over_the_turns_there_are() -> None:
    ends = torch.tensor([[0, 2, 4], [0, 2, -1]])
    rewards = torch.tensor([[1.0, NAN, 2.0], [NAN, 1.0, 5.0]])
    assert turn_returns(rewards, ends, 0.5).tolist() == [[1.5, 1.0, 2.0], [0.5, 1.0, 0.0]]
    assert turn_returns(rewards, ends, 0.0).tolist() == [[1.0, 0.0, 2.0], [0.0, 1.0, 0.0]]


# --- gigpo ------------------------------------------------------------------------------------

# Turns s0 s1 s1 (reward 1), s0 s2 (0), s0 s1 (1).
STATES = [[0, 1, 1], [0, 2], [0, 1]]
PAPER = turn_batch([[0.0, 0.0, 1.0], [0.0, 0.0], [0.0, 1.0]], STATES)
EPISODE = [0.577350, -1.154701, 0.577350]
STEPS = [[0.484181, -1.154681, 0.577340], [-1.149930, 0.0], [0.665749, 0.577340]]


def test_gigpo_by_hand() -> None:
    got = turns_of("gigpo", PAPER, gamma=0.9)
    for row, episode, steps in zip(got, EPISODE, STEPS, strict=True):
        assert row == pytest.approx([episode + step for step in steps], **SIX)
    metrics = estimate("gigpo", PAPER, gamma=0.9).metrics
    assert metrics["adv/turn_groups"] == metrics["adv/turn_groups_lt_4"] == 3


def test_the_weights_of_episode_and_turn() -> None:
    got = turns_of("gigpo", PAPER, gamma=0.9, outcome_weight=0.0, turn_weight=2.0)
    for row, steps in zip(got, STEPS, strict=True):
        assert row == pytest.approx([2 * step for step in steps], **SIX)


def test_without_a_deviation_both_parts_are_differences_from_the_mean() -> None:
    got = turns_of("gigpo", PAPER, gamma=0.9, norm_by_std=False)
    assert got[1] == pytest.approx([-2 / 3 - 0.57, -2 / 3])


def test_an_outcome_alone_comes_after_the_last_turn() -> None:
    nothing = turn_batch([[NAN] * 3, [NAN] * 2, [NAN] * 2], STATES, outcomes=[1.0, 0.0, 1.0])
    wanted = turns_of("gigpo", PAPER, gamma=0.9)
    assert turns_of("gigpo", nothing, gamma=0.9) == wanted
    other = turn_batch([[5.0, 0.0, 3.0], [7.0, 0.0], [0.0, 0.0]], STATES, outcomes=[1.0, 0.0, 1.0])
    assert turns_of("gigpo", other, gamma=0.9, turn_rewards="outcome") == wanted
    assert turns_of("gigpo", other, gamma=0.9) != wanted


def test_states_of_other_prompts_are_other_states() -> None:
    batch = turn_batch([[1.0], [0.0], [3.0], [1.0]], [[5]] * 4, group_id=[0, 0, 1, 1])
    alone = turn_batch([[1.0], [0.0]], [[5]] * 2)
    assert turns_of("gigpo", batch)[:2] == turns_of("gigpo", alone)


def test_unscored_episodes_enter_no_statistic() -> None:
    rewards, states = [[0.0, 1.0], [0.0, 0.0], [0.0, 9.0]], [[0, 1], [0, 1], [0, 1]]
    batch = turn_batch(rewards, states, scored=[True, True, False])
    got = turns_of("gigpo", batch)
    assert got[:2] == turns_of("gigpo", turn_batch(rewards[:2], states[:2]))
    assert got[2] == [0.0, 0.0]


def test_a_turn_that_branches_share_enters_once() -> None:
    # One episode of two branches that share their first turn, next to an episode of one row.
    batch = turn_batch(
        [[0.0, 1.0], [0.0, 1.0], [0.0, 0.0]],
        [[0, 1], [0, 2], [0, 1]],
        outcomes=[1.0, 1.0, 0.0],
        owned=[[True, True], [False, True], [True, True]],
        episode_id=torch.tensor([0, 0, 1]),
    )
    got = turns_of("gigpo", batch, gamma=1.0, eps=0.0)
    half = 0.5**0.5
    assert got[0] == pytest.approx([2 * half, 2 * half])
    assert got[1] == pytest.approx([half])  # its state came once
    assert got[2] == pytest.approx([-2 * half, -2 * half])
    metrics = estimate("gigpo", batch, gamma=1.0).metrics
    assert metrics["adv/turn_groups"] == 3  # states 0, 1 and 2


episodes = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.floats(-3, 3)), min_size=1, max_size=4),
    min_size=2,
    max_size=5,
)


def of_episodes(rows: list[list[tuple[int, float]]]) -> RolloutBatch:
    return turn_batch([[r for _, r in row] for row in rows], [[k for k, _ in row] for row in rows])


@given(rows=episodes)
def test_step_advantages_sum_to_zero_over_a_state(rows: list[list[tuple[int, float]]]) -> None:
    got = turns_of("gigpo", of_episodes(rows), outcome_weight=0.0)
    sums = dict.fromkeys(range(3), 0.0)
    for row, values in zip(rows, got, strict=True):
        for (state, _), value in zip(row, values, strict=True):
            sums[state] += value
    assert list(sums.values()) == pytest.approx([0.0] * 3, abs=1e-9)


@given(rows=episodes)
def test_without_a_repeated_state_it_is_grpo(rows: list[list[tuple[int, float]]]) -> None:
    rewards, count = [[r for _, r in row] for row in rows], 0
    states = []
    for row in rows:
        states.append(list(range(count, count + len(row))))
        count += len(row)
    batch = turn_batch(rewards, states)
    torch.testing.assert_close(
        estimate("gigpo", batch).advantages, estimate("grpo", batch).advantages
    )


@pytest.mark.parametrize("name", ["gigpo", "turn_grpo"])
@given(rows=episodes, seed=st.integers(0, 99))
def test_the_order_of_rows_does_not_matter(
    name: str, rows: list[list[tuple[int, float]]], seed: int
) -> None:
    batch = of_episodes(rows)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    got = estimate(name, batch.select(order)).advantages
    torch.testing.assert_close(got, estimate(name, batch).advantages[order], rtol=1e-9, atol=1e-9)


# --- turn_grpo --------------------------------------------------------------------------------

ROWS = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]


def test_turn_grpo_by_hand() -> None:
    got = turns_of("turn_grpo", turn_batch(ROWS, outcomes=[1.0, 0.0, 0.0]), eps=0.0)
    assert got[0] == pytest.approx([1.732051, 0.0], **SIX)
    assert got[1] == pytest.approx([-1.732051, 0.0], **SIX)
    assert got[2] == pytest.approx([0.0, 0.0], **SIX)


def test_an_episode_without_a_turn_is_not_in_its_statistic() -> None:
    batch = turn_batch([*ROWS, [1.0]], outcomes=[0.0] * 4)
    got = turns_of("turn_grpo", batch, eps=0.0)
    three = turns_of("turn_grpo", turn_batch(ROWS, outcomes=[0.0] * 3), eps=0.0)
    assert [row[1] for row in got[:3]] == [row[1] for row in three]
    assert got[0][0] != three[0][0]
    metrics = estimate("turn_grpo", batch).metrics
    assert metrics["adv/turn_groups"] == 2 and metrics["adv/turn_groups_lt_4"] == 1


def test_equal_outcomes_with_other_turns_are_no_group_without_a_signal() -> None:
    batch = turn_batch([[1.0, 0.0], [0.0, 1.0]], outcomes=[1.0, 1.0])
    assert estimate("turn_grpo", batch).metrics["group/zero_adv_frac"] == 0.0
    same = turn_batch([[1.0, 0.0], [1.0, 0.0]], outcomes=[1.0, 1.0])
    assert estimate("turn_grpo", same).metrics["group/zero_adv_frac"] == 1.0


def test_a_turn_that_only_one_episode_has_gets_nothing_of_its_own() -> None:
    got = turns_of("turn_grpo", turn_batch([[0.0, 5.0], [0.0]], outcomes=[0.0, 0.0]))
    assert got == [[0.0, 0.0], [0.0]]


def test_returns_instead_of_single_rewards() -> None:
    batch = turn_batch([[0.0, 2.0], [0.0, 0.0]], outcomes=[0.0, 0.0])
    own = turns_of("turn_grpo", batch, norm_by_std=False)
    assert own == [[0.0, 1.0], [0.0, -1.0]]
    summed = turns_of("turn_grpo", batch, norm_by_std=False, turn_returns=True, gamma=0.5)
    assert summed == [[0.5, 1.0], [-0.5, -1.0]]


@pytest.mark.parametrize("name", ["gigpo", "turn_grpo"])
def test_tokens_take_their_turns_advantage_and_observations_none(name: str) -> None:
    batch = turn_batch([[1.0, 0.0], [0.0, 3.0]], [[0, 1], [0, 1]], outcomes=[0.0, 0.0])
    found = estimate(name, batch).advantages
    assert found[:, 1].tolist() == [0.0, 0.0]
    assert (found[:, [0, 2]] != 0).any(dim=1).all()


@pytest.mark.parametrize("name", ["gigpo", "turn_grpo"])
def test_whitening_is_over_tokens_or_over_rows(name: str) -> None:
    batch = turn_batch([[1.0, 0.0], [0.0, 3.0], [0.5, 0.25]], [[0, 1]] * 3)
    tokens = estimate(name, batch, whiten="tokens").advantages[batch.mask.bool()]
    assert float(tokens.mean()) == pytest.approx(0, abs=1e-9)
    assert float(tokens.std()) == pytest.approx(1, abs=1e-6)
    rows = estimate(name, batch, whiten="sequences").advantages.sum(dim=1) / 2
    assert float(rows.mean()) == pytest.approx(0, abs=1e-9)
