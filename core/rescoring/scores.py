"""How the scores of one reward are distributed, failures apart from zeros."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from posttrain.core.types import Score

QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)


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

    @property
    def failures(self) -> int:
        """Scores that stand for something that went wrong."""
        return self.errors + self.timeouts + self.crashes


def distribution(scores: Sequence[Score]) -> ScoreDistribution:
    """Of checked scores, in any order."""
    values = [s.value for s in scores if s.value is not None]

    def count(status: str) -> int:
        return sum(score.status == status for score in scores)

    quantiles = None
    mean = std = None
    if values:
        tensor = torch.tensor(values, dtype=torch.float64)
        mean, std = float(tensor.mean()), float(tensor.std(correction=0))
        cuts = torch.tensor(QUANTILES, dtype=torch.float64)
        quantiles = tuple(float(q) for q in torch.quantile(tensor, cuts))
    return ScoreDistribution(
        scored=len(values),
        zeros=sum(value == 0 for value in values),
        unscored=count("unscored"),
        errors=count("error"),
        timeouts=count("timeout"),
        crashes=count("crashed"),
        mean=mean,
        std=std,
        quantiles=quantiles,
        distinct=len(set(values)),
    )


def recorded(values: Sequence[float]) -> list[Score]:
    """Scores of a column that was kept without its statuses; NaN is `unscored`."""
    return [Score(None, "unscored") if math.isnan(value) else Score(value) for value in values]
