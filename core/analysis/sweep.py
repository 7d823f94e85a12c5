"""What a variant gained over the base: differences paired over problems and seeds.

A cell d[s, p] is the variant's result on problem p with seed s, minus the base's. Problems of one
seed share a training run, and seeds may share problems, so cells are not independent. The variance
of the mean is bounded by the sum of that over seeds and that over problems, as two-way clustering
has it (Cameron, Gelbach and Miller, "Robust inference with multiway clustering", 2011) without the
term that they subtract: the interval is rather too wide than too narrow. Degrees of freedom are
Satterthwaite's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from posttrain.core.analysis.statistics import sampled_tokens
from posttrain.core.math.intervals import t_quantile

Cells = Mapping[int, Mapping[str, float]]
"""Differences in [-1, 1] by seed and by the key of a problem."""


@dataclass(frozen=True, slots=True)
class Effect:
    """The variant minus the base, with its 95 % interval; None where nothing bounds it."""

    difference: float
    low: float | None
    high: float | None
    how: str

    @property
    def shown(self) -> bool:
        """Whether the interval shows a difference: 0 is not in it."""
        if self.low is None or self.high is None:
            return False
        return self.low > 0 or self.high < 0

    def verdict(self) -> str:
        """In a word or two."""
        if not self.shown:
            return "no difference shown"
        return "better" if self.difference > 0 else "worse"


def paired_effect(cells: Cells) -> Effect | None:
    """The effect of cells of one or more seeds; None without any.

    The problems' part counts two more differences, -1 and +1, as `paired_means` does: few problems,
    or equal differences, are not certainty.
    """
    seeds = {seed: values for seed, values in cells.items() if values}
    if not seeds:
        return None
    means = [fmean(values.values()) for values in seeds.values()]
    difference = fmean(means)
    of_problem: dict[str, list[float]] = defaultdict(list)
    for values in seeds.values():
        for key, value in values.items():
            of_problem[key].append(value)
    over = [fmean(values) for values in of_problem.values()]
    parts = [_variance([*over, -1.0, 1.0])]
    how = f"paired over {len(over)} problems"
    if len(means) > 1:
        parts.append(_variance(means))
        how += f" and {len(means)} seeds"
    low, high = _interval(difference, parts)
    bounded = max(-1.0, min(low, difference)), min(1.0, max(high, difference))
    return Effect(difference, *bounded, how)


def seeds_effect(differences: Sequence[float]) -> Effect | None:
    """The effect of one difference for each seed, of a measure without problems; None of none.

    One seed has no interval, nor have equal differences.
    """
    if not differences:
        return None
    mean = fmean(differences)
    how = f"paired over {len(differences)} seeds"
    if len(differences) < 2 or max(differences) == min(differences):
        return Effect(mean, None, None, how)
    low, high = _interval(mean, [_variance(differences)])
    return Effect(mean, low, high, how)


def _variance(values: Sequence[float]) -> tuple[float, int]:
    """That of the mean of `values`, and its degrees of freedom."""
    mean = fmean(values)
    spread = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return spread / len(values), len(values) - 1


def _interval(centre: float, parts: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """`centre` with a t-interval whose variance is the sum of `parts`."""
    variance = math.fsum(part for part, _ in parts)
    freedom = variance**2 / math.fsum(part**2 / degrees for part, degrees in parts)
    half = t_quantile(freedom) * math.sqrt(variance)
    return centre - half, centre + half


@dataclass(frozen=True, slots=True)
class Speed:
    """When held-out accuracy during training first reached a target."""

    step: int
    tokens: float | None


def learning_speed(rows: Mapping[int, Mapping[str, float]], target: float) -> Speed | None:
    """The first step whose evaluation reached `target`, and the tokens sampled until then.

    `rows` are a stage's metrics by step; None if the target was never reached.
    """
    tokens, counted = 0.0, False
    for step in sorted(rows):
        row = rows[step]
        sampled = sampled_tokens(row)
        if sampled is not None:
            tokens, counted = tokens + sampled, True
        if row.get("eval/greedy_accuracy", -1.0) >= target:
            return Speed(step, tokens if counted or step == 0 else None)
    return None
