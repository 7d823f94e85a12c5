"""Tokens that are looked up in logits, and logits that nobody need make again.

Several tokens may follow one state, and are then looked up in one row of logits.
Axes: M rows of logits, N tokens, K rows of logits known, V vocabulary, n and m of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class Targets:
    """Token `ids` [N], each in a row of logits: its own, or that of `rows` [N], below `count`."""

    def __init__(self, ids: Tensor, rows: Tensor | None, count: int) -> None:
        self._ids, self._rows = ids, rows
        if rows is not None:
            self._order = rows.argsort(stable=True)
            ends = torch.bincount(rows, minlength=count).cumsum(0)
            self._starts = [0, *ends.tolist()]

    def __len__(self) -> int:
        return len(self._ids)

    def within(self, block: slice) -> tuple[slice | Tensor, Tensor, Tensor]:
        """Which tokens [n] are of rows `block`, which of these rows each is in, and their ids."""
        if self._rows is None:
            ids = self._ids[block]
            return block, torch.arange(len(ids), device=ids.device), ids
        which = self._order[self._starts[block.start] : self._starts[block.stop]]
        return which, self._rows[which] - block.start, self._ids[which]

    def summed(self, values: Tensor) -> Tensor:
        """The sum [M] of `values` [N] over the tokens of each row."""
        if self._rows is None:
            return values
        return values.new_zeros(len(self._starts) - 1).index_add_(0, self._rows, values)


@dataclass(frozen=True, slots=True)
class KnownLogits:
    """Rows `places` [M] of `values` [K, V]; `spent` when nobody else reads `values`.

    Then they may be overwritten, which takes places that ascend: row m is then written where no
    later row is read.
    """

    values: Tensor
    places: Tensor
    spent: bool = False

    def rows(self, block: slice) -> Tensor:
        """These rows; without a copy where they lie together."""
        places = self.places[block]
        first, last = int(places[0]), int(places[-1])
        if last - first == len(places) - 1 and bool((places.diff() == 1).all()):
            return self.values[first : last + 1]
        return self.values.index_select(0, places)

    def room(self) -> Tensor:
        """Room [M, V] for their gradients, which are to be written in order after being read."""
        if self.spent:
            return self.values[: len(self.places)]
        return self.values.new_empty(len(self.places), self.values.shape[1])
