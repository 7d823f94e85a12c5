"""`prime`: the outcome and the tokens' rewards, each against the other responses of the group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import AdvantageEstimator
from tests.helpers.plugins import MANAGER
from tests.helpers.rollouts import ragged_batch


def prime(**fields: Any) -> AdvantageEstimator[Any]:
    return MANAGER.build(AdvantageEstimator, "prime", fields)


def rows_of(
    process: list[list[float]], outcomes: list[float], groups: list[int], scored: list[int]
) -> RolloutBatch:
    """Rows of the lengths of `process`; what lies behind a response is not a number."""
    batch = ragged_batch([len(row) for row in process], group_size=1)
    width = batch.response_ids.shape[1]
    mask, q = (torch.zeros(len(process), width) for _ in range(2))
    q.fill_(torch.nan)
    rewards = torch.zeros_like(mask)
    for index, row in enumerate(process):
        mask[index, : len(row)] = 1
        q[index, : len(row)] = torch.tensor(row)
        rewards[index, len(row) - 1] = outcomes[index]
    return batch.with_columns(
        response_mask=mask,
        mask=mask,
        process_rewards=q,
        token_rewards=rewards,
        group_id=torch.tensor(groups),
        scored=torch.tensor(scored, dtype=batch.mask.dtype),
    )


def tokens(found: Tensor, lengths: list[int]) -> list[float]:
    return [float(x) for row, n in zip(found, lengths, strict=True) for x in row[:n]]


def test_the_worked_example() -> None:
    batch = rows_of([[0.2, -0.1], [0.1, 0.3, -0.1]], [1.0, 0.0], [0, 0], [1, 1])
    found = prime(process_coef=1.0, outcome_coef=1.0, whiten="off").estimate(batch).advantages
    assert tokens(found, [2, 3]) == pytest.approx([0.9, 0.65, -0.85, -0.9, -1.35], abs=1e-6)
    assert found[0, 2:].abs().sum() == 0
    white = prime().estimate(batch).advantages[batch.mask.bool()].double()
    assert float(white.mean()) == pytest.approx(0, abs=1e-6)
    assert float(white.std()) == pytest.approx(1, abs=1e-5)
    # The factors' common size does not matter once it is whitened; their ratio does.
    same = prime(process_coef=1.0, outcome_coef=1.0).estimate(batch).advantages
    torch.testing.assert_close(same[batch.mask.bool()].double(), white)
    other = prime(process_coef=50.0).estimate(batch).advantages[batch.mask.bool()].double()
    assert not torch.allclose(other, white, atol=1e-2)


def test_without_process_rewards_it_is_rloo() -> None:
    zeros = [[0.0, 0.0], [0.0], [0.0, 0.0, 0.0], [0.0]]
    batch = rows_of(zeros, [1.0, 0.0, 0.5, 2.0], [0, 0, 0, 1], [1, 1, 1, 1])
    found = prime(outcome_coef=1.0, whiten="off").estimate(batch).advantages
    rloo = MANAGER.build(AdvantageEstimator, "rloo").estimate(batch).advantages
    torch.testing.assert_close(found, rloo)
    assert not found[3].any(), "alone in its group"


def test_a_response_that_nobody_scored_is_in_no_mean() -> None:
    q = [[0.2, -0.1], [5.0], [0.1, 0.3, -0.1]]
    batch = rows_of(q, [1.0, 9.0, 0.0], [0, 0, 0], [1, 0, 1])
    found = prime(process_coef=1.0, outcome_coef=1.0, whiten="off").estimate(batch).advantages
    wanted = [0.9, 0.65, 0.0, -0.85, -0.9, -1.35]
    assert tokens(found, [2, 1, 3]) == pytest.approx(wanted, abs=1e-6)


def test_the_conventions_of_verl() -> None:
    """Written out after recipe/prime: reward_fn of the model, then the leave-one-out baseline."""
    q, outcomes = [[0.2, -0.1, 0.4], [0.1, 0.3, -0.1], [-0.7, 0.2]], [1.0, 0.0, 0.0]
    batch = rows_of(q, outcomes, [0, 0, 0], [1, 1, 1])
    cut = [[*row[:-1], 0.0] for row in q]
    largest = max(abs(sum(row[t:])) for row in cut for t in range(len(row)))
    assert largest == pytest.approx(0.7)
    own = [[value / (largest + 1e-6) for value in row] for row in cut]
    means = [sum(row) / len(row) for row in own]
    wanted = []
    for row in own:
        alone = [1.5 * value - 0.5 * sum(means) for value in row]
        wanted += [5 * sum(alone[t:]) for t in range(len(alone))]
    fields = {"process_norm": "batch", "process_last": False, "whiten": "off"}
    found = prime(outcome_coef=0.0, **fields).estimate(batch).advantages
    assert tokens(found, [3, 3, 2]) == pytest.approx(wanted, abs=1e-5)
    # The scale of the model's rewards is gone, and nobody's reward that has no score counts.
    larger = rows_of([[100 * v for v in row] for row in q], outcomes, [0, 0, 0], [1, 1, 1])
    same = prime(outcome_coef=0.0, **fields).estimate(larger).advantages
    torch.testing.assert_close(same, found, rtol=1e-4, atol=1e-5)
    more = rows_of([*q, [90.0, 90.0]], [*outcomes, 1.0], [0] * 4, [1, 1, 1, 0])
    with_unscored = prime(outcome_coef=0.0, **fields).estimate(more).advantages[:3]
    torch.testing.assert_close(with_unscored, found)


def test_an_episode_of_two_branches_is_one_response() -> None:
    """Its mean is of three tokens, and the group is of two, as if it were in one piece."""
    fields: dict[str, Any] = {"process_coef": 1.0, "outcome_coef": 1.0, "whiten": "off"}
    whole = rows_of([[0.2, -0.1], [0.1, 0.3, -0.1]], [1.0, 0.0], [0, 0], [1, 1])
    cut = rows_of([[0.2, -0.1], [0.1, 0.3], [-0.1]], [1.0, 0.0, 0.0], [0, 0, 0], [1, 1, 1])
    cut = cut.with_columns(episode_id=torch.tensor([0, 1, 1]))
    wanted = prime(**fields).estimate(whole).advantages
    found = prime(**fields).estimate(cut).advantages
    assert found[0, :2].tolist() == pytest.approx(wanted[0, :2].tolist())
    assert float(found[2, 0]) == pytest.approx(float(wanted[1, 2]))
    # q' of the first branch is .05 and .45, and its own end has the outcome -1.
    assert found[1, :2].tolist() == pytest.approx([-0.5, -0.55])
