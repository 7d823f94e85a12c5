"""Rows drawn again by their reward, and prompts taken out of an update."""

from __future__ import annotations

import pytest
import torch

from posttrain.core.batch import RolloutBatch
from posttrain.core.kit.batches import build_batch
from posttrain.core.training.groups import drop_groups, resample


def batch_of(rewards: list[float], groups: list[int], acc: list[float]) -> RolloutBatch:
    values = torch.tensor(rewards, dtype=torch.float64)
    return build_batch(
        torch.ones(len(rewards), 2),
        group_id=groups,
        token_rewards=torch.stack([torch.zeros_like(values), values], dim=1),
        rewards=values,
        acc=torch.tensor(acc),
        advantages=values[:, None].expand(-1, 2),
    )


@pytest.mark.parametrize("method", ["pow", "max_min", "max_random"])
def test_rows_are_drawn_in_proportion_to_their_weights(method: str) -> None:
    batch = batch_of([0.0, 1.0, 3.0, 2.0] * 250, [0, 0, 1, 1] * 250, [1.0] * 1000)
    draw = torch.Generator().manual_seed(0)
    drawn = resample(batch, method, 1.0, draw)  # type: ignore[arg-type]
    rewards = drawn.column("rewards")
    shares = {r: float((rewards == r).double().mean()) for r in (0.0, 1.0, 2.0, 3.0)}
    wanted = {
        "pow": {0.0: 0.0, 1.0: 1 / 6, 2.0: 2 / 6, 3.0: 3 / 6},
        "max_min": {0.0: 0.5, 1.0: 0.0, 2.0: 0.0, 3.0: 0.5},
        "max_random": {0.0: 1 / 7, 1.0: 1 / 7, 2.0: 1 / 7, 3.0: 4 / 7},
    }[method]
    for reward, share in wanted.items():
        assert shares[reward] == pytest.approx(share, abs=5 * (0.25 / 1000) ** 0.5)
    assert len(drawn) == len(batch) and torch.equal(drawn.seq_id, torch.arange(1000))
    assert torch.equal(drawn.column("advantages")[:, 0], rewards), "rows keep their advantages"


def test_unscored_rows_are_never_drawn() -> None:
    batch = batch_of([5.0, 1.0, 2.0], [0, 0, 0], [1.0] * 3)
    batch = batch.with_columns(scored=torch.tensor([False, True, True]))
    drawn = resample(batch, "pow", 1.0, torch.Generator().manual_seed(0))
    assert 5.0 not in drawn.column("rewards").tolist()


def test_groups_without_a_signal_lose_their_mask_and_nothing_else() -> None:
    """0: all right. 1: mixed, one reward for both. 2: all wrong. 3: mixed."""
    batch = batch_of(
        [1.0, 1.0, 0.5, 0.5, 0.1, 0.0, 1.0, 0.0],
        [0, 0, 1, 1, 2, 2, 3, 3],
        [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0],
    )
    by_verdict, metrics = drop_groups(batch, "equal_accuracy")
    assert by_verdict.mask[:, 0].tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert metrics == {"group/dropped_frac": 0.5}
    by_reward, metrics = drop_groups(batch, "zero_advantage")
    assert by_reward.mask[:, 0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert torch.equal(by_reward.response_mask, batch.response_mask)
    assert torch.equal(by_reward.column("token_rewards"), batch.column("token_rewards"))
    same, nothing = drop_groups(batch, "none")
    assert same is batch and nothing == {}
