import torch

from posttrain.core.contracts import GroupConfig
from posttrain.core.kit.batches import build_batch
from posttrain.core.kit.checks import assert_keeps_contract
from posttrain.core.kit.examples.advantage import Example


def test_it_keeps_what_advantages_promise() -> None:
    assert_keeps_contract(Example)


def test_advantages_of_a_group_by_hand() -> None:
    rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    batch = build_batch(
        torch.ones(2, 2),
        group_id=(0, 0),
        token_rewards=rewards,
        rewards=rewards.sum(dim=1),
    )
    found = Example(GroupConfig()).estimate(batch).advantages
    assert found.tolist() == [[0.5, 0.5], [-0.5, -0.5]]
