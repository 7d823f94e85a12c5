"""BAPO's search for clip bounds that let positive tokens contribute their share.

Everything is a function of N tokens' ratios r and advantages A, sorted once; prefix sums then give
the contributions under any bound. Axes: N tokens, K candidate bounds. All in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Contribution = Literal["gradient", "value_abs", "eq8_literal", "released"]


@dataclass(frozen=True, slots=True)
class BoundRange:
    """Where a bound starts, how far a move takes it, and where it ends."""

    start: float
    stop: float
    step: float

    def values(self) -> Tensor:
        """All values [K] it can take, the start first; multiples of the step, not sums of it."""
        num_moves = int((abs(self.stop - self.start) + 1e-9) / self.step)
        return self.start + self.step * torch.arange(num_moves + 1, dtype=torch.float64)


def candidates(low: BoundRange, high: BoundRange, *, low_first: bool = False) -> Tensor:
    """The bounds (low, high) [K, 2] in the order of the search: one range, then the other."""
    lows, highs = low.values(), high.values()
    num_low, num_high = lows.numel() - 1, highs.numel() - 1
    if low_first:
        lows = torch.cat([lows, lows[-1:].expand(num_high)])
        highs = torch.cat([highs[:1].expand(num_low), highs])
    else:
        lows = torch.cat([lows[:1].expand(num_high), lows])
        highs = torch.cat([highs, highs[-1:].expand(num_low)])
    return torch.stack([lows, highs], dim=1)


class SortedSums:
    """Sums of weights over the tokens on either side of any ratio."""

    def __init__(self, ratio: Tensor, weight: Tensor) -> None:
        self._keys, order = torch.sort(ratio)
        zero = torch.zeros(1, dtype=weight.dtype)
        self._sums = torch.cat([zero, weight[order].cumsum(0)])

    def below(self, bounds: Tensor) -> Tensor:
        return self._sums[torch.searchsorted(self._keys, bounds.contiguous())]

    def above(self, bounds: Tensor) -> Tensor:
        inside = torch.searchsorted(self._keys, bounds.contiguous(), right=True)
        return self._sums[-1] - self._sums[inside]


def contributions(
    ratio: Tensor, advantage: Tensor, bounds: Tensor, kind: Contribution
) -> tuple[Tensor, Tensor]:
    """P and N [K]: what positive and negative tokens contribute under `bounds` (low, high) [K, 2].

    `ratio` and `advantage` are [N]; weights of tokens belong into the advantage. `gradient`: P sums
    r A over A > 0, r < high, and N sums r |A| over A < 0, r > low. The others sum the clipped
    values: A min(r, high) and |A| max(r, low).
    """
    ratio, advantage = ratio.double(), advantage.double()
    good, bad = advantage > 0, advantage < 0
    low, high = bounds[:, 0], bounds[:, 1]
    positive = SortedSums(ratio[good], (ratio * advantage)[good]).below(high)
    negative = SortedSums(ratio[bad], -(ratio * advantage)[bad]).above(low)
    if kind != "gradient":
        total, count = advantage[good].sum(), -advantage[bad].sum()
        positive = positive + high * (total - SortedSums(ratio[good], advantage[good]).below(high))
        negative = negative + low * (count - SortedSums(ratio[bad], -advantage[bad]).above(low))
    return positive, negative


def positive_share(positive: Tensor, negative: Tensor, kind: Contribution) -> Tensor:
    """rho [K] of contributions P and N: P / (P + N), or the paper's and the released forms.

    `eq8_literal` is |P| / |P - N| (its denominator sums signed terms), `released` P / N. With
    nothing to divide by, rho is 1: there are no negatives to balance.
    """
    below = {
        "gradient": positive + negative,
        "value_abs": positive + negative,
        "eq8_literal": (positive - negative).abs(),
        "released": negative,
    }[kind]
    return torch.where(below > 0, positive / below.clamp(min=1e-300), torch.ones_like(below))


@dataclass(frozen=True, slots=True)
class FoundBounds:
    """The bounds a search ended at, the share there, and how many moves it took."""

    low: float
    high: float
    share: float
    num_moves: int


def search(
    ratio: Tensor,
    advantage: Tensor,
    grid: Tensor,
    target: float,
    *,
    kind: Contribution = "gradient",
    skip_if_one_sided: bool = True,
) -> FoundBounds:
    """The first bounds of `grid` [K, 2] with a share of at least `target`, else the last.

    The start is kept when no move could change a token's clipping, and with `skip_if_one_sided`
    when there is no positive token. Source: BAPO, arXiv:2510.18927, Algorithm 1.
    """
    shares = positive_share(*contributions(ratio, advantage, grid, kind), kind)
    good, bad = advantage > 0, advantage < 0
    movable = (good & (ratio >= grid[0, 1])).any() or (bad & (ratio <= grid[-1, 0])).any()
    reached = (shares >= target).nonzero()
    index = int(reached[0]) if reached.numel() else grid.shape[0] - 1
    if not movable or (skip_if_one_sided and not good.any()):
        index = 0
    return FoundBounds(float(grid[index, 0]), float(grid[index, 1]), float(shares[index]), index)
