"""Rewards of a batch as pure functions: weighted sum, clip, and the record of both."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.core.math.groups import equal_share
from posttrain.core.rewards.scoring import (
    clip_rewards,
    component_metrics,
    reward_metrics,
    weighted_sum,
)

NAN = float("nan")


def test_what_is_missing_adds_nothing_and_what_nobody_scored_is_no_zero() -> None:
    components = torch.tensor(
        [[1.0, 2.0], [NAN, 2.0], [NAN, NAN], [math.inf, 0.0], [-math.inf, 1.0]], dtype=torch.float64
    )
    rewards, scored = weighted_sum(components, [1.0, 0.5])
    assert rewards.tolist() == [2.0, 1.0, 0.0, 0.0, 0.0] and rewards.dtype == torch.float64
    assert scored.tolist() == [True, True, False, False, False]


def test_a_weight_of_zero_does_not_hide_what_is_not_finite() -> None:
    _, scored = weighted_sum(torch.tensor([[math.inf, 1.0]]), [0.0, 1.0])
    assert scored.tolist() == [False]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (-1.0, 1.0, [-1.0, 0.5, 1.0]),
        (None, 1.0, [-3.0, 0.5, 1.0]),
        (0.0, None, [0.0, 0.5, 4.0]),
        (None, None, [-3.0, 0.5, 4.0]),
    ],
)
def test_rewards_are_clipped_on_the_sides_that_have_a_bound(
    low: float | None, high: float | None, expected: list[float]
) -> None:
    assert clip_rewards(torch.tensor([-3.0, 0.5, 4.0]), low, high).tolist() == expected


def test_the_record_leaves_out_what_is_unscored() -> None:
    rewards, scored = torch.tensor([1.0, 3.0, 0.0]), torch.tensor([True, True, False])
    got = reward_metrics(rewards, scored)
    assert got == {"reward/mean": 2.0, "reward/std": 1.0, "reward/min": 1.0, "reward/max": 3.0}
    assert reward_metrics(rewards, scored, ddof=1)["reward/std"] == pytest.approx(2**0.5)
    assert reward_metrics(rewards, torch.zeros(3, dtype=torch.bool)) == {}
    components = torch.tensor([[1.0, NAN], [3.0, NAN], [NAN, NAN]])
    assert component_metrics(components, ["a", "b"]) == {
        "reward/component/a": 2.0,
        "reward/component_std/a": 1.0,
    }


def test_the_share_of_equal_groups_looks_at_scored_rows() -> None:
    rewards = torch.tensor([0.7, 0.7, 5.0, 1.0, 0.0, 2.0])
    groups = torch.tensor([0, 0, 0, 1, 1, 2])
    scored = torch.tensor([True, True, False, True, True, False])
    assert equal_share(rewards, groups, scored) == 0.5
    assert equal_share(rewards, torch.zeros_like(groups), scored) == 0.0
    assert equal_share(rewards, groups, torch.zeros(6, dtype=torch.bool)) == 0.0
