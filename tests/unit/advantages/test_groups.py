"""What every group estimator shares: groups of one, equal rewards, shared prefixes, metrics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain.core.contracts import (
    AdvantageEstimator,
    GroupAdvantage,
    RowAdvantage,
    TurnAdvantage,
)
from posttrain.core.kit.batches import build_batch
from posttrain.core.plugin_manager import PluginEntry
from tests.helpers.advantages import MANAGER, estimate, outcome_batch, per_row
from tests.helpers.plugins import of_kind

GROUP_ESTIMATORS = [
    param for param in of_kind("advantage") if issubclass(param.values[0].cls, GroupAdvantage)
]
ALL_EQUAL = {
    "3 x 0.45": torch.full((3,), 0.45),
    "63 x 0.6": torch.full((63,), 0.6),
    "30 x 0.9": torch.full((30,), 0.9),
    "sums": torch.stack([torch.tensor(0.1) + torch.tensor(0.6), *torch.full((2,), 0.7)]),
}


def columns_for(rewards: Tensor) -> dict[str, Tensor]:
    """The reward in the form that every estimator reads it in."""
    zeros = torch.zeros(len(rewards), 1)
    return {
        "reward_components": rewards[:, None],
        "step_score": rewards[:, None],
        "step_end": zeros.long(),
        "acc": (rewards > 0).double(),
        "turn_end": zeros.long(),
        "turn_reward": rewards[:, None],
        "state_key": zeros.long(),
    }


@pytest.mark.parametrize("entry", GROUP_ESTIMATORS)
@pytest.mark.parametrize("rewards", ALL_EQUAL.values(), ids=ALL_EQUAL.keys())
def test_an_all_equal_group_teaches_exactly_nothing(entry: PluginEntry, rewards: Tensor) -> None:
    # In addition to a group that does differ, so that whitening has something to scale.
    both = torch.cat([rewards, torch.tensor([1.0, 0.0, 0.5])])
    group_id = [0] * len(rewards) + [1] * 3
    batch = outcome_batch(both, group_id, **columns_for(both))
    got = estimate(entry.name, batch, whiten="off")
    assert got.advantages.dtype == torch.float32
    assert got.advantages[: len(rewards)].abs().max() == 0.0
    assert got.advantages[len(rewards) :].abs().max() > 0.1
    assert got.metrics["group/zero_adv_frac"] == 0.5


@pytest.mark.parametrize("entry", GROUP_ESTIMATORS)
def test_a_group_of_one_teaches_nothing_unless_raw_is_asked_for(entry: PluginEntry) -> None:
    rewards = torch.tensor([3.0], dtype=torch.float64)
    batch = outcome_batch(rewards, **columns_for(rewards))
    got = estimate(entry.name, batch, whiten="off")
    assert got.advantages.tolist() == [[0.0]]
    wanted = {"group/zero_adv_frac": 1.0, "adv/singleton_groups": 1.0}
    assert {name: got.metrics[name] for name in wanted} == wanted
    assert MANAGER.build(AdvantageEstimator, entry.name).smallest_group() == 2
    raw = estimate(entry.name, batch, whiten="off", singleton="raw")
    assert raw.advantages.item() == pytest.approx(3.0, abs=1e-5)
    fields = {"singleton": "raw"}
    assert MANAGER.build(AdvantageEstimator, entry.name, fields).smallest_group() == 1


@pytest.mark.parametrize("entry", GROUP_ESTIMATORS)
def test_rows_of_a_group_need_not_be_adjacent(entry: PluginEntry) -> None:
    rewards = torch.tensor([1.0, 5.0, 0.0, 2.0, 0.5, 4.0], dtype=torch.float64)
    mixed = [0, 1, 0, 1, 0, 1]
    order = torch.tensor([0, 2, 4, 1, 3, 5])
    batch = outcome_batch(rewards, mixed, **columns_for(rewards))
    got = estimate(entry.name, batch).advantages
    sorted_batch = outcome_batch(rewards[order], [0, 0, 0, 1, 1, 1], **columns_for(rewards[order]))
    torch.testing.assert_close(got[order], estimate(entry.name, sorted_batch).advantages)


@pytest.mark.parametrize("name", ["grpo", "prm_sequence", "gdpo"])
def test_z_scores_do_not_depend_on_the_scale_of_the_rewards(name: str) -> None:
    rewards = torch.tensor([1.0, 0.2, 0.0, 0.7, 0.5], dtype=torch.float64)

    def scores(factor: float) -> Any:
        scaled = factor * rewards
        return estimate(name, outcome_batch(scaled, **columns_for(scaled))).advantages

    torch.testing.assert_close(scores(10.0), scores(1.0), rtol=0, atol=1e-5)


# --- shared prefixes of a tree ----------------------------------------------------------------

# Two responses share their first two tokens; a third went its own way.
TREE = torch.tensor([[7, 7, 1], [7, 7, 2], [3, 3, 3]])


def on_tree(**fields: object) -> Tensor:
    batch = outcome_batch([1.0, 0.0, 0.5], lengths=[3, 3, 2], node_id=TREE)
    return estimate("dr_grpo", batch, **fields).advantages


def test_each_copy_of_a_shared_token_keeps_its_own_advantage() -> None:
    assert on_tree().tolist() == [[0.5] * 3, [-0.5] * 3, [0.0] * 3]


def test_shared_tokens_may_take_the_mean_of_their_responses() -> None:
    assert on_tree(attribution="hard").tolist() == [[0.0, 0.0, 0.5], [0.0, 0.0, -0.5], [0.0] * 3]


def test_a_shared_token_may_count_once() -> None:
    assert on_tree(dedup_prefix=True).tolist() == [
        [0.25, 0.25, 0.5],
        [-0.25, -0.25, -0.5],
        [0.0] * 3,
    ]


@pytest.mark.parametrize("fields", [{"attribution": "hard"}, {"dedup_prefix": True}])
def test_only_a_tree_needs_node_ids(fields: dict[str, object]) -> None:
    assert "node_id" in MANAGER.build(AdvantageEstimator, "grpo", fields).required_columns()
    assert "node_id" not in MANAGER.build(AdvantageEstimator, "grpo").required_columns()


def test_the_same_node_number_in_another_group_is_another_node() -> None:
    batch = build_batch(
        [[1, 1]] * 4,
        group_id=[0, 0, 1, 1],
        token_rewards=torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 4.0], [0.0, 0.0]]).double(),
        node_id=torch.zeros(4, 2, dtype=torch.int64),
    )
    got = estimate("dr_grpo", batch, dedup_prefix=True).advantages
    assert got[:, 0].tolist() == [0.25, -0.25, 1.0, -1.0]


def test_rewards_of_tokens_reach_the_outcome() -> None:
    """KL in the reward is part of what rloo compares."""
    batch = build_batch(
        [[1, 1], [1, 0]],
        group_id=[0, 0],
        token_rewards=torch.tensor([[-0.25, 1.0], [0.0, 9.0]]).double(),
    )
    assert estimate("rloo", batch).advantages[:, 0].tolist() == [0.75, -0.75]


def test_a_row_without_loss_still_counts_in_its_group() -> None:
    batch = outcome_batch([1.0, 0.0, 0.5], lengths=[2, 2, 2])
    filtered = batch.with_columns(mask=batch.mask * torch.tensor([[0.0], [1.0], [1.0]]))
    got = estimate("dr_grpo", filtered).advantages[:, 0].tolist()
    assert got == [0.0, *per_row("dr_grpo", [1.0, 0.0, 0.5])[1:]]


ROW_ESTIMATORS = [
    param
    for param in of_kind("advantage")
    if issubclass(param.values[0].cls, RowAdvantage)
    and not issubclass(param.values[0].cls, TurnAdvantage)  # a branch has turns of its own
]


@pytest.mark.parametrize("whiten", ["off", "sequences"])
@pytest.mark.parametrize("entry", ROW_ESTIMATORS)
def test_branches_of_an_episode_change_nobody_s_advantage(entry: PluginEntry, whiten: str) -> None:
    """An episode of three branches, of 6 tokens together, next to four of one."""
    rewards, group = torch.tensor([1.0, 0.0, 0.25, 1.0, 0.0]).double(), [0, 0, 0, 1, 1]
    fields: dict[str, Any] = {"whiten": whiten}
    if entry.name == "pass_at_k":
        fields["k"] = 1
    whole = outcome_batch(rewards, group, [6, 2, 4, 3, 1], **columns_for(rewards))
    wanted = estimate(entry.name, whole, **fields).advantages[:, 0]
    rows = torch.tensor([0, 0, 0, 1, 2, 3, 4])
    branched = outcome_batch(
        rewards[rows],
        [group[row] for row in rows.tolist()],
        [3, 1, 2, 2, 4, 3, 1],
        episode_id=rows,
        **columns_for(rewards[rows]),
    )
    found = estimate(entry.name, branched, **fields).advantages[:, 0]
    torch.testing.assert_close(found, wanted[rows])
