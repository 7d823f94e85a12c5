"""How a rollout batch is cut up: epochs into mini-batches of groups, these into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.runtime.seeding import generator
from posttrain.core.training.stream import distinct_prompts


@dataclass(frozen=True, slots=True)
class Splitting:
    """What a model's settings say of how a rollout batch is cut up for its updates.

    Micro-batches change memory and speed, never the result.
    """

    epochs: int
    num_mini_batches: int
    micro_batch_size: int
    max_tokens: int | None = field(default=None, kw_only=True)

    @property
    def updates_per_batch(self) -> int:
        """Optimizer steps taken on each rollout batch."""
        return self.epochs * self.num_mini_batches

    def mini_batches(
        self, batch: RolloutBatch, seed: int, *path: str | int
    ) -> Iterator[tuple[Tensor, RolloutBatch]]:
        """The mini-batches of all epochs, each with the indices of its rows in `batch`."""
        for rows in mini_rows(batch, self.epochs, self.num_mini_batches, seed, *path):
            yield rows, batch if self.num_mini_batches == 1 else batch.select(rows)

    def micro_rows(self, batch: RolloutBatch, num_ranks: int = 1) -> list[Tensor]:
        """Row indices of each micro-batch of `batch`."""
        return micro_rows(batch, self.micro_batch_size, self.max_tokens, num_ranks)


def mini_rows(
    batch: RolloutBatch, epochs: int, num_parts: int, seed: int, *path: str | int
) -> Iterator[Tensor]:
    """In every epoch the batch's groups in `num_parts` parts, shuffled by (seed, path, epoch).

    Each part as the indices of its rows.
    """
    for epoch in range(epochs):
        if num_parts == 1:
            yield torch.arange(len(batch))
            continue
        groups = list(batch.groups())
        order = torch.randperm(len(groups), generator=generator(seed, *path, epoch)).tolist()
        for part in torch.tensor(order).tensor_split(num_parts):
            if part.numel():  # fewer groups than parts: a batch that was drawn again
                yield torch.cat([groups[i] for i in part.tolist()])


def micro_size(count: int, size: int, num_ranks: int) -> int:
    """Rows of a micro-batch: `size`, or fewer so that each rank has one, if there are that many."""
    return max(1, min(size, -(-count // num_ranks)))


def micro_rows(
    batch: RolloutBatch, size: int, max_tokens: int | None = None, num_ranks: int = 1
) -> list[Tensor]:
    """Row indices of each micro-batch: at most `size` rows and, if given, `max_tokens` tokens.

    There are at least as many as ranks, where there are as many rows.

    Without `max_tokens` rows stay in order, so a group's rows mostly share one micro-batch and one
    prompt. With it whole groups are spread so that all parts have about as many tokens, a prompt
    counted once; a group that is too large is cut up, and a row that is longer is one by itself.
    """
    size = micro_size(len(batch), size, num_ranks)
    if max_tokens is None:
        return list(torch.split(torch.arange(len(batch)), size))
    units = _units(batch, size, max_tokens)
    total = sum(unit.tokens for unit in units)
    bins = [_Unit([], 0) for _ in range(max(-(-total // max_tokens), -(-len(batch) // size)))]
    for unit in sorted(units, key=lambda unit: -unit.tokens):
        fits = [b for b in bins if b.takes(unit, size, max_tokens)]
        if not fits:
            fits = [_Unit([], 0)]
            bins += fits
        least = min(fits, key=lambda b: b.tokens)
        least.rows += unit.rows
        least.tokens += unit.tokens
    found = sorted(sorted(b.rows) for b in bins if b.rows)
    return [torch.tensor(rows) for rows in found]


@dataclass(slots=True)
class _Unit:
    """Rows that stay together, and the tokens that a forward pass over them takes."""

    rows: list[int]
    tokens: int

    def takes(self, other: _Unit, size: int, max_tokens: int) -> bool:
        """Whether `other` may join."""
        few = len(self.rows) + len(other.rows) <= size
        return not self.rows or (few and self.tokens + other.tokens <= max_tokens)


def _units(batch: RolloutBatch, size: int, max_tokens: int) -> list[_Unit]:
    """The groups, in as many pieces as the limits ask for; each piece has a prompt once."""
    prompts, which = batch.prompt_mask.sum(dim=1).tolist(), distinct_prompts(batch)[1].tolist()
    columns = torch.arange(1, batch.response_mask.shape[1] + 1)
    responses = (columns * batch.response_mask).amax(dim=1).tolist()
    units = []
    for group in batch.groups():
        unit = _Unit([], 0)
        for row in group.tolist():
            alone = _Unit([row], prompts[row] + responses[row])
            known = which[row] in {which[other] for other in unit.rows}
            one = _Unit([row], responses[row]) if known else alone
            if not unit.takes(one, size, max_tokens):
                units.append(unit)
                unit, one = _Unit([], 0), alone
            unit = _Unit(unit.rows + one.rows, unit.tokens + one.tokens)
        units.append(unit)
    return units
