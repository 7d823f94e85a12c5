"""Mean and deviation of a stream of numbers, kept in three numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


class RunningMoments:
    """Count, mean and sum of squared deviations of everything seen, updated batch by batch.

    Equal to the moments of all values at once. Sources: Welford (1962); merging of two parts: Chan,
    Golub and LeVeque (1979).
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.squares = 0.0  # sum of (value - mean)^2

    def update(self, values: Tensor) -> None:
        """Take in `values` [N]; none at all changes nothing."""
        added = values.numel()
        if added == 0:
            return
        part = values.detach().to(torch.float64)
        mean = float(part.mean())
        squares = float((part - mean).square().sum())
        total, apart = self.count + added, mean - self.mean
        self.squares += squares + apart**2 * self.count * added / total
        self.mean += apart * added / total
        self.count = total

    def std(self, ddof: int = 1) -> float:
        """The deviation of all values; NaN while there are no more than `ddof`."""
        if self.count <= ddof:
            return math.nan
        return math.sqrt(self.squares / (self.count - ddof))

    def state(self) -> dict[str, float]:
        return {"count": float(self.count), "mean": self.mean, "squares": self.squares}

    def load_state(self, state: Mapping[str, float]) -> None:
        if state:
            self.count = int(state["count"])
            self.mean, self.squares = float(state["mean"]), float(state["squares"])
