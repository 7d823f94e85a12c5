"""What other rewards change: the distribution of scores, and the order of responses in groups.

The order within groups is all that groups teach. Axes: B rows of one batch, N groups.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.core.math.groups import all_equal, scored_groups
from posttrain.core.types import Score

QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
TOLERANCE = 1e-6
"""Rewards closer than this, times the larger of 1 and their size, are equal, as for estimators."""


@dataclass(frozen=True, slots=True)
class ScoreDistribution:
    """Of a reward's scores: those with a value, and how many have none and why.

    `zeros` are scored and exactly 0. `quantiles` are those of `QUANTILES`, interpolated linearly;
    mean, deviation (n in the divisor) and quantiles are None where nothing was scored.
    """

    scored: int
    zeros: int
    unscored: int
    errors: int
    timeouts: int
    crashes: int
    mean: float | None
    std: float | None
    quantiles: tuple[float, ...] | None
    distinct: int


def distribution(scores: Sequence[Score]) -> ScoreDistribution:
    """Of checked scores, in any order."""
    statuses = Counter(score.status for score in scores)
    values = [score.value for score in scores if score.value is not None]
    tensor = torch.tensor(values, dtype=torch.float64)
    cuts = torch.tensor(QUANTILES, dtype=torch.float64)
    return ScoreDistribution(
        scored=len(values),
        zeros=sum(value == 0 for value in values),
        unscored=statuses["unscored"],
        errors=statuses["error"],
        timeouts=statuses["timeout"],
        crashes=statuses["crashed"],
        mean=float(tensor.mean()) if values else None,
        std=float(tensor.std(correction=0)) if values else None,
        quantiles=tuple(torch.quantile(tensor, cuts).tolist()) if values else None,
        distinct=len(set(values)),
    )


def recorded(values: Sequence[float]) -> list[Score]:
    """Scores of a column that was kept without its statuses; NaN is `unscored`."""
    return [Score(None, "unscored") if math.isnan(value) else Score(value) for value in values]


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

    def counts(self) -> dict[str, int]:
        """Sums over the groups.

        `groups_with_sign_change` have a response that would be pushed the other way; those that
        `became_equal` would teach nothing any more, those that `stopped_being_equal` would.
        """
        return {
            "groups": len(self.groups),
            "pairs": sum(group.pairs for group in self.groups),
            "flipped": sum(group.flipped for group in self.groups),
            "tied": sum(group.tied for group in self.groups),
            "sign_changes": sum(group.signs for group in self.groups),
            "groups_with_sign_change": sum(group.signs > 0 for group in self.groups),
            "became_equal": sum(g.is_equal and not g.was_equal for g in self.groups),
            "stopped_being_equal": sum(g.was_equal and not g.is_equal for g in self.groups),
        }


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
