"""Advantages from step scores: `grpo_process` and `prm_sequence`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import AdvantageEstimator
from posttrain.core.errors import ConfigError
from posttrain.core.kit.batches import build_batch
from tests.helpers.advantages import MANAGER, estimate

NAN = float("nan")


def step_batch(
    lengths: Sequence[int],
    ends: Sequence[Sequence[int]],
    scores: Sequence[Sequence[float]],
    group_id: Sequence[int] | None = None,
    scored: Sequence[bool] | None = None,
) -> RolloutBatch:
    """Rows with steps that end at these token indices; padded here."""
    width = max(1, *(len(row) for row in ends))
    mask = (torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]).double()
    return build_batch(
        mask,
        group_id=group_id if group_id is not None else [0] * len(lengths),
        scored=scored,
        token_rewards=torch.zeros_like(mask),
        rewards=torch.zeros(len(lengths)),
        step_end=torch.tensor([[*row, *[-1] * (width - len(row))] for row in ends]),
        step_score=torch.tensor(
            [[*row, *[NAN] * (width - len(row))] for row in scores], dtype=torch.float64
        ),
    )


# Steps (1, 0) that end at tokens 2 and 4, and (0, 1, 1) that end at 1, 3 and 5, counted from one.
PAPER = step_batch([4, 5], [[1, 3], [0, 2, 4]], [[1.0, 0.0], [0.0, 1.0, 1.0]])


def test_process_supervision_by_hand() -> None:
    got = estimate("grpo_process", PAPER).advantages
    first = [-0.365148, -0.365148, -1.095445, -1.095445, 0.0]
    second = [0.365148, 1.460593, 1.460593, 0.730297, 0.730297]
    assert got[0].tolist() == pytest.approx(first, abs=1e-5)
    assert got[1].tolist() == pytest.approx(second, abs=1e-5)


def test_process_plus_outcome_normalises_each_part_before_the_sum() -> None:
    """Rewards 10 and 30 have advantages -+0.707107, whatever their scale, added to the steps'."""
    rewards = torch.zeros(2, 5, dtype=torch.float64)
    rewards[0, 3], rewards[1, 4] = 10.0, 30.0
    batch = PAPER.with_columns(token_rewards=rewards, rewards=rewards.sum(dim=1))
    steps, outcome = estimate("grpo_process", PAPER), estimate("grpo", batch)
    assert outcome.advantages[:, 0].tolist() == pytest.approx([-0.707107, 0.707107], abs=1e-6)
    got = estimate("process_plus_outcome", batch, outcome_coef=0.5, process_coef=2.0)
    wanted = 0.5 * outcome.advantages + 2.0 * steps.advantages
    torch.testing.assert_close(got.advantages, wanted)
    assert got.advantages[0, 4] == 0, "the first response has four tokens"
    equal = estimate("process_plus_outcome", PAPER.with_columns(rewards=torch.ones(2)))
    torch.testing.assert_close(equal.advantages, steps.advantages)


def test_the_mean_of_the_steps_to_come_does_not_grow_with_their_number() -> None:
    summed = estimate("grpo_process", PAPER).advantages
    got = estimate("grpo_process", PAPER, reduce="mean").advantages
    assert got[0].tolist() == pytest.approx((summed[0] / torch.tensor([2, 2, 1, 1, 1])).tolist())
    assert got[1].tolist() == pytest.approx((summed[1] / torch.tensor([3, 2, 2, 1, 1])).tolist())


def test_tokens_after_the_last_step_and_rows_without_steps_get_nothing() -> None:
    batch = step_batch([4, 3, 2], [[1], [2], []], [[1.0], [0.0], []])
    got = estimate("grpo_process", batch).advantages
    assert (got[0, :2] > 0).all() and got[0, 2:].abs().sum() == 0
    assert (got[1, :3] < 0).all() and got[2].abs().sum() == 0


def test_unscored_steps_and_rows_stay_out_of_the_pool() -> None:
    ends, scores = [[0, 1], [0, 1], [1]], [[1.0, NAN], [0.0, 0.5], [9.0]]
    batch = step_batch([2, 2, 2], ends, scores, scored=[True, True, False])
    fewer = step_batch([2, 2], [[0], [0, 1]], [[1.0], [0.0, 0.5]])
    got, wanted = (estimate("grpo_process", b).advantages for b in (batch, fewer))
    torch.testing.assert_close(got[:2], wanted)
    assert got[2].abs().sum() == 0


@pytest.mark.parametrize(
    "batch",
    [
        step_batch([2, 2], [[0], []], [[1.0], []]),
        step_batch([2, 2], [[0, 1], [1]], [[0.3, 0.1 + 0.2], [0.3]]),
        step_batch([2], [[0, 1]], [[1.0, 0.0]]),
    ],
    ids=["one step", "all equal", "one response"],
)
def test_nothing_to_compare_is_exactly_zero(batch: RolloutBatch) -> None:
    got = estimate("grpo_process", batch)
    assert got.advantages.abs().sum() == 0 and got.metrics["group/zero_adv_frac"] == 1.0


def test_branches_of_one_episode_are_no_group() -> None:
    """An episode is not compared with itself, and its steps are pooled with those of others."""
    batch = PAPER.with_columns(episode_id=torch.tensor([0, 0]))
    found = estimate("grpo_process", batch)
    assert not found.advantages.any()
    assert found.metrics == {"group/zero_adv_frac": 1.0, "adv/singleton_groups": 1.0}
    kept = estimate("grpo_process", batch, singleton="raw", eps=0.0).advantages
    assert kept[0].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    two = step_batch([4, 5, 1], [[1, 3], [0, 2, 4], [0]], [[1.0, 0.0], [0.0, 1.0, 1.0], [0.5]])
    apart = estimate("grpo_process", two).advantages
    joined = estimate("grpo_process", two.with_columns(episode_id=torch.tensor([0, 0, 1])))
    assert joined.advantages.tolist() == apart.tolist()


def test_a_group_of_one_may_keep_its_step_scores() -> None:
    batch = step_batch([2], [[0, 1]], [[1.0, 0.5]])
    got = estimate("grpo_process", batch, singleton="raw", eps=0.0)
    assert got.advantages.tolist() == [[1.5, 0.5]]
    assert got.metrics["adv/singleton_groups"] == 1.0


# --- prm_sequence -----------------------------------------------------------------------------


STEPS = ([3, 3, 3], [[0, 1, 2], [1], [0, 2]], [[0.5, 0.8, 0.2], [0.9], [1.0, 0.4]])


@pytest.mark.parametrize(
    ("fields", "rewards"),
    [
        ({}, [0.5, 0.9, 0.7]),
        ({"aggregate": "min"}, [0.2, 0.9, 0.4]),
        ({"aggregate": "last"}, [0.2, 0.9, 0.4]),
        ({"aggregate": "sum"}, [1.5, 0.9, 1.4]),
        ({"aggregate": "prod"}, [0.08, 0.9, 0.4]),
        ({"aggregate": "weighted", "weights": [1.0, 3.0]}, [(0.5 + 2.4 + 0.6) / 7, 0.9, 0.55]),
    ],
)
def test_step_scores_become_an_outcome(fields: dict[str, object], rewards: list[float]) -> None:
    got = estimate("prm_sequence", step_batch(*STEPS), baseline="centre", **fields)
    mean = sum(rewards) / 3
    assert got.advantages[:, 0].tolist() == pytest.approx([r - mean for r in rewards])
    assert torch.equal(got.advantages[:, 0], got.advantages[:, 2])


def test_the_outcome_goes_through_a_group_baseline() -> None:
    batch, rewards = step_batch(*STEPS), torch.tensor([0.5, 0.9, 0.7]).double()
    scores = estimate("prm_sequence", batch, eps=0.0).advantages[:, 0]
    torch.testing.assert_close(scores, (rewards - rewards.mean()) / rewards.std())
    population = estimate("prm_sequence", batch, eps=0.0, ddof=0).advantages[:, 0]
    torch.testing.assert_close(population, scores * 1.5**0.5)
    loo = estimate("prm_sequence", batch, baseline="loo").advantages[:, 0]
    torch.testing.assert_close(loo, (rewards - rewards.mean()) * 1.5)


def test_a_response_without_a_scored_step_is_no_zero_in_its_group() -> None:
    batch = step_batch([2, 2, 2, 2], [[0], [1], [], [1]], [[1.0], [0.0], [], [NAN]])
    got = estimate("prm_sequence", batch, baseline="centre").advantages[:, 0].tolist()
    assert got == [0.5, -0.5, 0.0, 0.0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"aggregate": "weighted"}, "belong together"),
        ({"weights": [1.0]}, "belong together"),
        ({"aggregate": "weighted", "weights": [1.0, 0.0]}, "greater than 0"),
    ],
)
def test_weights_and_their_aggregate_belong_together(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        MANAGER.build(AdvantageEstimator, "prm_sequence", fields)
