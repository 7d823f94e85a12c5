"""The `reinforce_baseline` advantage: four baselines, one of them with a memory."""

from __future__ import annotations

import json

import pytest
import torch

from posttrain.core.contracts import AdvantageEstimator
from posttrain.core.errors import ConfigError
from tests.helpers.advantages import MANAGER, outcome_batch, per_row

NAME = "reinforce_baseline"
REWARDS, GROUPS = [1.0, 0.0, 3.0, 3.0], [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [
        ("batch_mean", [-0.75, -1.75, 1.25, 1.25]),
        ("group_mean", [0.5, -0.5, 0.0, 0.0]),
        ("none", REWARDS),
    ],
)
def test_what_is_subtracted(baseline: str, expected: list[float]) -> None:
    assert per_row(NAME, REWARDS, GROUPS, baseline=baseline) == pytest.approx(expected)


@pytest.mark.parametrize("baseline", ["batch_mean", "group_mean"])
def test_equal_rewards_leave_exactly_nothing(baseline: str) -> None:
    # Sums of components that are equal on paper: 0.1 + 0.6 and 0.7 in float32.
    rewards = torch.stack([torch.tensor(0.1) + torch.tensor(0.6), *torch.full((2,), 0.7)])
    assert len(rewards.unique()) == 2
    assert per_row(NAME, rewards, baseline=baseline) == [0.0] * 3


def test_group_mean_with_global_whitening_is_that_of_reinforce_pp() -> None:
    rewards, groups = [1.0, 0.0, 3.0, 2.5], [0, 0, 1, 1]
    mine = per_row(NAME, rewards, groups, baseline="group_mean", whiten="tokens")
    assert mine == pytest.approx(per_row("reinforce_pp_baseline", rewards, groups))


def test_a_group_of_one_has_no_group_mean() -> None:
    def smallest(**fields: object) -> int:
        return MANAGER.build(AdvantageEstimator, NAME, fields).smallest_group()

    assert smallest(baseline="group_mean") == 2
    assert smallest() == smallest(baseline="ema") == 1


def test_the_moving_average_scores_a_whole_batch_before_it_moves() -> None:
    estimator = MANAGER.build(AdvantageEstimator, NAME, {"baseline": "ema", "decay": 0.9})
    assert estimator.required_columns() >= {"agent_id"}
    batch = outcome_batch([1.0, 3.0, 10.0], agent_id=torch.tensor([0, 0, 7]))
    assert estimator.estimate(batch).advantages[:, 0].tolist() == [1.0, 3.0, 10.0]
    assert estimator.state() == pytest.approx({"ema/0": 0.2, "ema/7": 1.0})
    assert estimator.estimate(batch).advantages[:, 0].tolist() == pytest.approx([0.8, 2.8, 9.0])
    assert estimator.state() == pytest.approx({"ema/0": 0.38, "ema/7": 1.9})


def test_the_moving_average_survives_a_checkpoint() -> None:
    fields = {"baseline": "ema"}
    first, second = (MANAGER.build(AdvantageEstimator, NAME, fields) for _ in range(2))
    batch = outcome_batch([1.0, 3.0, 10.0], agent_id=torch.tensor([0, 0, -2]))
    first.estimate(batch)
    second.load_state(json.loads(json.dumps(first.state())))
    assert second.state() == first.state()
    assert torch.equal(second.estimate(batch).advantages, first.estimate(batch).advantages)


def test_unscored_responses_do_not_move_the_average() -> None:
    estimator = MANAGER.build(AdvantageEstimator, NAME, {"baseline": "ema", "decay": 0.0})
    batch = outcome_batch(
        [float("nan"), 3.0, float("nan")],
        scored=[False, True, False],
        agent_id=torch.tensor([0, 0, 1]),
    )
    estimator.estimate(batch)
    assert estimator.state() == {"ema/0": 3.0}


def test_a_baseline_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="baseline"):
        MANAGER.build(AdvantageEstimator, NAME, {"baseline": "median"})
