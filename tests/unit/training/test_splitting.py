"""Mini-batches keep groups whole and cover the batch once per epoch."""

from __future__ import annotations

import torch

from posttrain.core.training.splitting import micro_rows, mini_batches
from tests.helpers.rollouts import ragged_batch


def test_every_epoch_has_each_group_once_and_whole_in_an_order_of_its_own() -> None:
    batch = ragged_batch([3] * 8, group_size=2)
    parts = [mini.seq_id.tolist() for mini in mini_batches(batch, 2, 3, 7, "policy", 5)]
    assert [len(part) for part in parts] == [6, 6, 4] * 2
    epochs = [sum(parts[:3], []), sum(parts[3:], [])]
    assert all(sorted(epoch) == list(range(16)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert all(epoch[i] + 1 == epoch[i + 1] for epoch in epochs for i in range(0, 16, 2))
    again = [mini.seq_id.tolist() for mini in mini_batches(batch, 2, 3, 7, "policy", 5)]
    later = [mini.seq_id.tolist() for mini in mini_batches(batch, 2, 3, 7, "policy", 6)]
    assert parts == again != later


def test_one_mini_batch_is_the_batch_itself() -> None:
    batch = ragged_batch([3, 4], group_size=2)
    assert all(mini is batch for mini in mini_batches(batch, 3, 1, 0))


def test_micro_batches_cover_the_rows_in_order() -> None:
    batch = ragged_batch([3, 4, 5], group_size=2)
    rows = list(micro_rows(batch, 4))
    assert [len(part) for part in rows] == [4, 2]
    assert torch.equal(torch.cat(rows), torch.arange(6))
