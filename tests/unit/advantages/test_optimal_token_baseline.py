"""The `optimal_token_baseline` advantage: a baseline per position."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import AdvantageEstimator
from posttrain.core.kit.batches import build_batch
from tests.helpers.advantages import MANAGER, estimate

NAME = "optimal_token_baseline"
NAN = float("nan")


def otb_batch(
    mask: list[list[int]], rewards: list[float], norms: list[list[float]], **columns: Tensor
) -> RolloutBatch:
    """Rows of one group; `norms` are the squared norms of each token's score."""
    response = torch.tensor(mask).double()
    valid = response.bool()
    chosen = torch.full_like(response, 0.5)
    # norm = 1 - 2 p + sum p^2, so with p = 0.5 the sum of squares is the norm itself.
    dense = torch.zeros_like(response)
    for row, reward in enumerate(rewards):
        if valid[row].any():
            dense[row, int(valid[row].nonzero()[-1])] = reward
    nothing = torch.full_like(response, NAN)
    return build_batch(
        response,
        group_id=[0] * len(mask),
        token_rewards=torch.where(valid, dense, nothing),
        old_logprobs=torch.where(valid, chosen.log(), nothing),
        sum_pi_squared=torch.where(valid, torch.tensor(norms).double(), nothing),
        **columns,
    )


def test_the_baseline_weighs_returns_by_all_norms_so_far() -> None:
    batch = otb_batch([[1, 1], [1, 1]], [1.0, 0.0], [[0.3, 0.2], [0.1, 0.4]])
    got = estimate(NAME, batch).advantages
    assert got[:, 0].tolist() == pytest.approx([1 - 0.3 / 0.4, -0.3 / 0.4])
    assert got[:, 1].tolist() == pytest.approx([1 - 0.5, -0.5])


def test_equal_norms_make_it_the_mean_of_the_group() -> None:
    batch = otb_batch([[1, 1], [1, 1], [1, 1]], [1.0, 0.0, 0.5], [[0.2, 0.2]] * 3)
    got = estimate(NAME, batch).advantages
    assert got[:, 0].tolist() == pytest.approx([0.5, -0.5, 0.0], abs=1e-7)


def test_past_the_second_longest_response_the_longest_is_alone() -> None:
    batch = otb_batch([[1, 1, 1], [1, 0, 0]], [2.0, 1.0], [[0.25, 0.25, 0.25], [0.75, NAN, NAN]])
    free = estimate(NAME, batch).advantages
    assert free[0].tolist() == pytest.approx([0.75, 2.0, 2.0])
    assert free[1].tolist() == pytest.approx([-0.25, 0.0, 0.0])
    bound = estimate(NAME, batch, handle_zero_tail=False).advantages
    assert bound[0].tolist() == pytest.approx([0.75, 0.0, 0.0], abs=1e-6)


def test_responses_meet_at_the_same_column_or_at_the_same_sampled_token() -> None:
    mask, norms = [[1, 0, 1], [1, 1, 0]], [[0.2, NAN, 0.2], [0.2, 0.2, NAN]]
    batch = otb_batch(mask, [1.0, 0.0], norms)
    padded = estimate(NAME, batch, handle_zero_tail=False).advantages
    # Their second tokens stand in different columns, so neither has anything to be compared with.
    assert padded[0].tolist() == pytest.approx([0.5, 0.0, 0.0], abs=1e-6)
    valid = estimate(NAME, batch, align="valid").advantages
    assert valid.tolist() == [
        pytest.approx([0.5, 0.0, 0.5], abs=1e-6),
        pytest.approx([-0.5, -0.5, 0.0], abs=1e-6),
    ]


def test_importance_weights_enter_squared() -> None:
    weight = torch.tensor([[2.0, 1.0], [1.0, 1.0]])
    batch = otb_batch([[1, 1], [1, 1]], [1.0, 0.0], [[0.1, 0.2], [0.2, 0.2]], is_weight=weight)
    estimator = MANAGER.build(AdvantageEstimator, NAME, {"weighted": True})
    assert "is_weight" in estimator.required_columns()
    got = estimator.estimate(batch).advantages
    assert got[0].tolist() == pytest.approx([1 - 0.4 / 0.6, 1 - 0.6 / 1.0])


def test_without_tokens_a_row_is_out_of_the_group_only_when_tokens_are_aligned() -> None:
    batch = otb_batch([[1, 1], [0, 0]], [1.0, 0.0], [[0.2, 0.2], [NAN, NAN]])
    got = estimate(NAME, batch, align="valid", singleton="raw")
    assert got.advantages[0].tolist() == [1.0, 1.0]
    assert got.metrics["adv/singleton_groups"] == 1.0
    assert estimate(NAME, batch, align="valid").advantages.abs().sum() == 0


def test_an_all_equal_group_teaches_nothing_not_even_in_its_tail() -> None:
    mask, norms = [[1, 1, 1], [1, 0, 0]], [[0.2, 0.2, 0.2], [0.4, NAN, NAN]]
    batch = otb_batch(mask, [0.7, 0.1 + 0.6], norms)
    got = estimate(NAME, batch)
    assert got.advantages.abs().sum() == 0 and got.metrics["group/zero_adv_frac"] == 1.0
