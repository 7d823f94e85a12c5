"""Mini-batches keep groups whole and cover the batch once per epoch."""

from __future__ import annotations

import torch

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import Aggregator
from posttrain.core.data.tokens import response_batch
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.training.splitting import Splitting, micro_rows
from tests.helpers.rollouts import ragged_batch


def test_every_epoch_has_each_group_once_and_whole_in_an_order_of_its_own() -> None:
    batch = ragged_batch([3] * 8, group_size=2)
    parts = [
        mini.seq_id.tolist() for _, mini in Splitting(2, 3, 1).mini_batches(batch, 7, "policy", 5)
    ]
    assert [len(part) for part in parts] == [6, 6, 4] * 2
    epochs = [sum(parts[:3], []), sum(parts[3:], [])]
    assert all(sorted(epoch) == list(range(16)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert all(epoch[i] + 1 == epoch[i + 1] for epoch in epochs for i in range(0, 16, 2))
    again = [
        mini.seq_id.tolist() for _, mini in Splitting(2, 3, 1).mini_batches(batch, 7, "policy", 5)
    ]
    later = [
        mini.seq_id.tolist() for _, mini in Splitting(2, 3, 1).mini_batches(batch, 7, "policy", 6)
    ]
    assert parts == again != later


def test_one_mini_batch_is_the_batch_itself() -> None:
    batch = ragged_batch([3, 4], group_size=2)
    assert all(mini is batch for _, mini in Splitting(3, 1, 1).mini_batches(batch, 0))


def test_micro_batches_cover_the_rows_in_order() -> None:
    batch = ragged_batch([3, 4, 5], group_size=2)
    rows = list(micro_rows(batch, 4))
    assert [len(part) for part in rows] == [4, 2]
    assert torch.equal(torch.cat(rows), torch.arange(6))


def test_a_batch_of_fewer_groups_than_planned_splits_without_losing_any() -> None:
    """What dynamic sampling leaves when its rounds are used up."""
    for groups, parts, sizes in ((5, 2, [6, 4]), (3, 4, [2, 2, 2]), (1, 4, [2])):
        batch = ragged_batch([3] * groups, group_size=2)
        found = [mini.seq_id.tolist() for _, mini in Splitting(1, parts, 1).mini_batches(batch, 7)]
        assert [len(part) for part in found] == sizes
        assert sorted(sum(found, [])) == list(range(2 * groups))


def test_each_part_of_a_partial_batch_is_divided_by_its_own_counts() -> None:
    aggregator = PluginManager().build(Aggregator, "token-mean")
    parts = Splitting(1, 2, 1).mini_batches(ragged_batch([3] * 5, group_size=2), 7)
    minis = [mini for _, mini in parts]
    counts = [aggregator.count(mini.mask, mini.group_id) for mini in minis]
    assert [int(count.num_tokens) for count in counts] == [int(mini.mask.sum()) for mini in minis]
    assert counts[0].num_tokens != counts[1].num_tokens


def sizes(batch: RolloutBatch, rows: list[torch.Tensor]) -> list[int]:
    """Tokens of each part, a group's prompt counted once for each part it is in."""
    found = []
    for part in rows:
        micro = batch.select(part)
        firsts = [int(group[0]) for group in micro.groups()]
        found.append(int(micro.prompt_mask[firsts].sum() + micro.response_mask.sum()))
    return found


def batch_of(prompt: int, responses: list[int], group_size: int) -> RolloutBatch:
    """Groups with a prompt of `prompt` tokens, and responses of `responses` tokens by group."""
    lengths = [length for length in responses for _ in range(group_size)]
    return response_batch(
        prompts=[[7] * prompt] * len(lengths),
        responses=[[8] * length for length in lengths],
        group_ids=[row // group_size for row in range(len(lengths))],
        pad_token_id=0,
        problems=(),
    )


def test_a_budget_of_tokens_gives_parts_of_about_equal_work_with_groups_whole() -> None:
    batch = batch_of(10, [3, 40, 5, 38, 4, 36, 6, 33], group_size=2)
    total = 8 * 10 + 2 * 165
    rows = micro_rows(batch, 16, max_tokens=total // 4 + 8)
    assert sorted(torch.cat(rows).tolist()) == list(range(16))
    assert all(torch.equal(part, part.sort().values) for part in rows)
    found = sizes(batch, rows)
    assert sum(found) == total, "no prompt is in two parts"
    assert len(found) == 4
    assert max(found) <= total // 4 + 8
    assert max(found) <= 1.15 * min(found)


def test_what_is_larger_than_the_budget_is_cut_up_and_a_long_row_is_alone() -> None:
    batch = batch_of(10, [30, 3, 3], group_size=4)
    rows = micro_rows(batch, 16, max_tokens=70)
    assert sorted(torch.cat(rows).tolist()) == list(range(12))
    assert sizes(batch, rows) == [70, 70, 44]
    alone = micro_rows(batch, 16, max_tokens=25)
    assert [part.tolist() for part in alone[:4]] == [[0], [1], [2], [3]]
    assert [len(part) for part in micro_rows(batch, 3, max_tokens=10_000)] == [3, 3, 3, 3]


def test_rows_of_a_group_with_prompts_of_their_own_take_the_tokens_of_each() -> None:
    batch = response_batch(
        prompts=[[7] * 10, [7] * 10, [9] * 30, [9] * 30],
        responses=[[8] * 5] * 4,
        group_ids=[0] * 4,
        pad_token_id=0,
        problems=(),
    )
    parts = micro_rows(batch, 16, max_tokens=40)
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3]]
    assert [part.tolist() for part in micro_rows(batch, 16, max_tokens=60)] == [[0, 1, 2, 3]]
