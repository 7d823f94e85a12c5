"""The `grpo` advantage: worked examples, edges and properties."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from posttrain.core.contracts import AdvantageEstimator
from posttrain.core.errors import ConfigError
from posttrain.core.kit.batches import build_batch
from posttrain.core.plugin_manager import PluginManager

NAN = float("nan")
MANAGER = PluginManager()
rewards_lists = st.lists(st.floats(-5, 5), min_size=2, max_size=8)


def per_row(
    rewards: list[float] | Tensor,
    group_id: list[int],
    scored: list[bool] | None = None,
    **fields: object,
) -> Tensor:
    estimator = MANAGER.build(AdvantageEstimator, "grpo", fields)
    values = torch.as_tensor(rewards)
    values = values if isinstance(rewards, Tensor) else torch.tensor(rewards, dtype=torch.float64)
    batch = build_batch(
        torch.ones(len(group_id), 1),
        group_id=group_id,
        scored=scored,
        token_rewards=values[:, None],
    )
    return estimator.estimate(batch).advantages[:, 0]


def advantages(rewards: list[float], **fields: object) -> list[float]:
    """Advantages of one-token rows of one group."""
    return per_row(rewards, [0] * len(rewards), **fields).tolist()


@pytest.mark.parametrize(
    ("size", "right", "high", "low"),
    [(8, 1, 2.474874, -0.353553), (8, 4, 0.935414, -0.935414), (16, 1, 3.75, -0.25)],
)
def test_binary_groups_have_their_closed_form(
    size: int, right: int, high: float, low: float
) -> None:
    got = advantages([1.0] * right + [0.0] * (size - right), eps=0.0)
    assert got[0] == pytest.approx(math.sqrt((size - right) * (size - 1) / (size * right)))
    assert got == pytest.approx([high] * right + [low] * (size - right), abs=1e-6)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"norm_by_std": False}, [2 / 3, 2 / 3, -4 / 3]),
        ({"std_scope": "none"}, [2 / 3, 2 / 3, -4 / 3]),
        ({}, [0.577350, 0.577350, -1.154700]),
        ({"ddof": 0}, [0.707107, 0.707107, -1.414214]),
        ({"norm_by_std": False, "leave_one_out": True}, [1.0, 1.0, -2.0]),
    ],
)
def test_two_right_and_one_wrong(fields: dict[str, object], expected: list[float]) -> None:
    assert advantages([1.0, 1.0, -1.0], **fields) == pytest.approx(expected, abs=2e-6)


def test_leaving_one_out_does_not_divide_the_outlier_by_zero() -> None:
    got = advantages([1.0, 0.0, 0.0, 0.0], leave_one_out=True)
    assert got == pytest.approx([1.0, -0.577349, -0.577349, -0.577349], abs=1e-6)
    assert advantages([1.0, 0.0, 0.0, 0.0]) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=4e-6)


@pytest.mark.parametrize(
    "rewards",
    [
        torch.full((3,), 0.45),
        torch.full((63,), 0.6),
        torch.full((30,), 0.9),
        torch.stack([torch.tensor(0.1) + torch.tensor(0.6), torch.tensor(0.7), torch.tensor(0.7)]),
        torch.full((15,), 0.98),
    ],
)
def test_an_all_equal_group_teaches_exactly_nothing(rewards: Tensor) -> None:
    got = per_row(rewards, [0] * len(rewards), eps=1e-9)
    assert got.dtype == torch.float32
    assert got.abs().max().item() == 0.0


def test_sums_of_components_that_differ_by_rounding_count_as_equal_only_within_the_tolerance() -> (
    None
):
    rewards = torch.tensor([0.7 + 6e-8, 0.7, 0.7], dtype=torch.float64)
    assert per_row(rewards, [0] * 3).abs().max().item() == 0.0
    assert per_row(rewards, [0] * 3, zero_tol=0.0).abs().max().item() > 0.01


def test_a_group_of_one_teaches_nothing_unless_raw_is_asked_for() -> None:
    assert advantages([3.0]) == [0.0]
    assert advantages([3.0], singleton="raw") == pytest.approx([3.0], abs=1e-5)
    assert advantages([3.0], singleton="raw", norm_by_std=False) == [3.0]
    assert advantages([3.0], singleton="raw", eps=0.5) == [2.0]


def test_unscored_rows_stay_out_of_the_statistics_and_get_zero() -> None:
    got = per_row(
        [1.0, NAN, -1.0, 0.0],
        [0, 0, 0, 0],
        scored=[True, False, True, True],
        norm_by_std=False,
    )
    assert got.tolist() == pytest.approx([1.0, 0.0, -1.0, 0.0])


def test_a_group_with_one_scored_row_counts_as_a_group_of_one() -> None:
    got = per_row([1.0, 0.0], [0, 0], scored=[True, False])
    assert got.tolist() == [0.0, 0.0]


def test_batch_scope_centres_in_the_group_and_divides_by_the_deviation_of_the_batch() -> None:
    rewards = [1.0, 0.0, 5.0, 3.0]
    got = per_row(rewards, [0, 0, 1, 1], std_scope="batch", eps=0.0)
    std = torch.tensor(rewards).double().std().item()
    assert got.tolist() == pytest.approx([x / std for x in (0.5, -0.5, 1.0, -1.0)])


def test_a_row_without_loss_still_counts_in_its_group() -> None:
    estimator = MANAGER.build(AdvantageEstimator, "grpo", {"norm_by_std": False})
    batch = build_batch(
        [[0, 0], [1, 1]],
        response_mask=torch.tensor([[1, 1], [1, 1]]),
        group_id=[0, 0],
        token_rewards=torch.tensor([[0.0, 0.0], [0.0, 1.0]]).double(),
    )
    assert estimator.estimate(batch).advantages.tolist() == [[0.0, 0.0], [0.5, 0.5]]


def test_metrics_tell_groups_without_signal() -> None:
    batch = build_batch(
        torch.ones(5, 1),
        group_id=[0, 0, 1, 1, 2],
        token_rewards=torch.tensor([[1.0], [1.0], [1.0], [0.0], [1.0]]),
    )
    metrics = MANAGER.build(AdvantageEstimator, "grpo").estimate(batch).metrics
    assert metrics == {"group/zero_adv_frac": pytest.approx(2 / 3), "adv/singleton_groups": 1.0}


def test_a_batch_without_scored_rows_is_all_zero() -> None:
    got = per_row([NAN, NAN], [0, 0], scored=[False, False], std_scope="batch")
    assert got.tolist() == [0.0, 0.0]


def test_a_wrong_option_names_the_field() -> None:
    with pytest.raises(ConfigError, match="advantage 'grpo': std_scope"):
        MANAGER.build(AdvantageEstimator, "grpo", {"std_scope": "world"})


@given(rewards_lists, st.floats(-100, 100))
def test_adding_a_constant_to_every_reward_changes_nothing(row: list[float], shift: float) -> None:
    zeros = [0] * len(row)
    base = per_row(row, zeros, norm_by_std=False)
    moved = per_row([x + shift for x in row], zeros, norm_by_std=False)
    torch.testing.assert_close(base, moved, rtol=0, atol=2e-4)


@given(rewards_lists)
def test_ten_times_the_rewards_give_the_same_advantages(row: list[float]) -> None:
    assume(torch.tensor(row).double().std().item() >= 0.1)
    zeros = [0] * len(row)
    base = per_row(row, zeros)
    scaled = per_row([10 * x for x in row], zeros)
    torch.testing.assert_close(base, scaled, rtol=0, atol=1e-4)


@given(rewards_lists)
def test_advantages_of_a_group_sum_to_zero(row: list[float]) -> None:
    assert per_row(row, [0] * len(row)).sum().abs().item() < 1e-8


def test_no_gradient_leaves_the_estimator() -> None:
    batch = build_batch([[1.0], [1.0]], group_id=[0, 0], token_rewards=torch.tensor([[1.0], [0.0]]))
    assert not MANAGER.build(AdvantageEstimator, "grpo").estimate(batch).advantages.requires_grad
