"""How several ranks share a batch: each computes some micro-batches, sums are over all ranks.

Every rank has the whole batch, cuts it in the same way and takes its counts, so a rank's share of a
loss is divided by what one process alone would divide it by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from posttrain.core.training.metrics import MetricSums

PartT = TypeVar("PartT")


class Ranks(Protocol):
    """The processes that train one model together, as each of them sees them."""

    rank: int
    size: int

    def share(self, parts: Sequence[PartT]) -> list[tuple[PartT, bool]]:
        """The parts that this rank computes, and whether each counts.

        Sharded weights are gathered by all ranks together, so all of them compute equally many: a
        rank with none left computes one again that does not count.
        """

    def add(self, values: Tensor) -> Tensor:
        """The sum over ranks, on each of them; of a tensor on the CPU."""

    def merge(self, sums: MetricSums) -> MetricSums:
        """What all ranks have measured, the same on each of them."""


class OneProcess:
    """No other ranks: the share of this process is everything."""

    rank: int = 0
    size: int = 1

    def share(self, parts: Sequence[PartT]) -> list[tuple[PartT, bool]]:
        """As in `Ranks`."""
        return [(part, True) for part in parts]

    def add(self, values: Tensor) -> Tensor:
        """As in `Ranks`."""
        return values

    def merge(self, sums: MetricSums) -> MetricSums:
        """As in `Ranks`."""
        return sums


ALONE: Ranks = OneProcess()


class ProcessGroup:
    """The ranks of torch's default process group."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # Batches and metrics are on the CPU, which NCCL does not serve.
        self._cpu = dist.new_group(backend="gloo")

    def share(self, parts: Sequence[PartT]) -> list[tuple[PartT, bool]]:
        """Every `size`-th part, in order."""
        own = [(part, True) for part in parts[self.rank :: self.size]]
        rounds = -(-len(parts) // self.size)
        return own + [(parts[0], False)] * (rounds - len(own))

    def add(self, values: Tensor) -> Tensor:
        """As in `Ranks`."""
        total = values.detach().clone()
        dist.all_reduce(total, group=self._cpu)
        return total

    def merge(self, sums: MetricSums) -> MetricSums:
        """As in `Ranks`; in the order of ranks, so that all of them have the same."""
        found: list[MetricSums | None] = [None] * self.size
        dist.all_gather_object(found, sums, group=self._cpu)
        merged = MetricSums()
        for one in found:
            assert one is not None
            merged.merge(one)
        return merged

    def collect(self, value: object) -> list[Any]:  # Any: pickled
        """The `value` of each rank, in order, on all of them."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._cpu)
        return found


def in_place(rows: Sequence[Tensor], parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """`parts` at their `rows` of a tensor of `shape` on the CPU, 0 where no part is."""
    dtype = parts[0].dtype if parts else torch.float32
    whole = torch.zeros(tuple(shape), dtype=dtype)
    for index, part in zip(rows, parts, strict=True):
        whole[index] = part.detach().cpu()
    return whole


def add_gradients(loss: Tensor, counts: bool) -> None:
    """The backward pass of a micro-batch's share of the loss, which gives 0 if it does not count.

    Ranks with sharded weights make equally many of them; `Ranks.share` says which count.
    """
    (loss if counts else 0.0 * loss).backward()  # type: ignore[no-untyped-call]
