"""How a rollout batch is cut up: epochs into mini-batches of groups, these into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.runtime.seeding import generator


def mini_batches(
    batch: RolloutBatch, epochs: int, num_parts: int, seed: int, *path: str | int
) -> Iterator[RolloutBatch]:
    """In every epoch the batch's groups in `num_parts` parts, shuffled by (seed, path, epoch)."""
    for epoch in range(epochs):
        if num_parts == 1:
            yield batch
            continue
        groups = list(batch.groups())
        order = torch.randperm(len(groups), generator=generator(seed, *path, epoch)).tolist()
        for part in torch.tensor(order).tensor_split(num_parts):
            if part.numel():  # fewer groups than parts: a batch that was drawn again
                yield batch.select(torch.cat([groups[i] for i in part.tolist()]))


def micro_rows(batch: RolloutBatch, size: int) -> Iterator[Tensor]:
    """Row indices of each micro-batch of at most `size` rows.

    Rows stay in order, so a group's rows mostly share one micro-batch and one prompt forward.
    """
    yield from torch.split(torch.arange(len(batch)), size)
