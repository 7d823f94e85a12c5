"""What other rewards change within groups: the order of responses is all that groups teach.

Axes: B rows of one batch; N groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.core.math.groups import all_equal, scored_groups

TOLERANCE = 1e-6
"""Rewards closer than this, times the larger of 1 and their size, are equal, as for estimators."""


@dataclass(frozen=True, slots=True)
class GroupFlips:
    """A group under old and new rewards, over the rows scored by both.

    `flipped` pairs change their order, `tied` pairs lose it or gain one, of `pairs` in all.
    `signs` are rows whose reward moves from above its group's mean to below it, or back: with
    advantages that are centred in the group, these change their sign.
    """

    group: int
    rows: tuple[int, ...]
    pairs: int
    flipped: int
    tied: int
    signs: int
    was_equal: bool
    is_equal: bool


@dataclass(frozen=True, slots=True)
class Flips:
    """All groups of a batch; `row_flips` [B] counts the flipped pairs that a row is in."""

    groups: tuple[GroupFlips, ...]
    row_flips: Tensor

    def total(self, name: str) -> int:
        """Sum of a count over the groups."""
        return sum(int(getattr(group, name)) for group in self.groups)

    @property
    def groups_with_sign_change(self) -> int:
        """Groups in which some response would be pushed the other way."""
        return sum(group.signs > 0 for group in self.groups)

    @property
    def became_equal(self) -> int:
        """Groups that taught something and would teach nothing."""
        return sum(group.is_equal and not group.was_equal for group in self.groups)

    @property
    def stopped_being_equal(self) -> int:
        """Groups that taught nothing and would teach something."""
        return sum(group.was_equal and not group.is_equal for group in self.groups)


def find_flips(old: Tensor, new: Tensor, both_scored: Tensor, group_ids: Tensor) -> Flips:
    """Old and new rewards [B] compared within groups [B], over rows that `both_scored` [B]."""
    row_flips = torch.zeros(len(old), dtype=torch.int64)
    groups = []
    for rows in scored_groups(group_ids, both_scored):
        before, after = old[rows].double(), new[rows].double()
        first, second = _order(before), _order(after)
        crossed = first * second < 0
        tied = (first == 0) != (second == 0)
        row_flips[rows] = crossed.sum(dim=1)
        signs = _signs(before) * _signs(after) < 0
        groups.append(
            GroupFlips(
                group=int(group_ids[rows[0]]),
                rows=tuple(rows.tolist()),
                pairs=len(rows) * (len(rows) - 1) // 2,
                flipped=int(crossed.sum()) // 2,
                tied=int(tied.sum()) // 2,
                signs=int(signs.sum()),
                was_equal=all_equal(before, TOLERANCE),
                is_equal=all_equal(after, TOLERANCE),
            )
        )
    return Flips(tuple(groups), row_flips)


def _order(values: Tensor) -> Tensor:
    """[G, G]: the sign of value i less value j, 0 where they are equal up to rounding."""
    gaps = values[:, None] - values[None, :]
    return _rounded(gaps, values).sign()


def _signs(values: Tensor) -> Tensor:
    """[G]: above (+1), at (0) or below (-1) the group's mean."""
    return _rounded(values - values.mean(), values).sign()


def _rounded(gaps: Tensor, values: Tensor) -> Tensor:
    limit = TOLERANCE * max(1.0, float(values.abs().max()))
    return torch.where(gaps.abs() <= limit, torch.zeros_like(gaps), gaps)
