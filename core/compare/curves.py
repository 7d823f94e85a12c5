"""Learning curves of several runs on one axis: the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from posttrain.core.math.intervals import mean_interval

MAIN_METRICS = (
    "reward/mean",
    "acc/mean",
    "eval/greedy_accuracy",
    "kl/ref_k3",
    "entropy/mean",
    "resp_len/mean",
    "clip/frac",
    "grad/norm",
    "loss/total",
    "sft/loss",
    "loss/preference",
    "rm/held_out_pair_accuracy",
    "pref/held_out_pair_accuracy",
)
"""Those that are compared, where any of the runs has them."""


@dataclass(frozen=True, slots=True)
class Point:
    """The mean over `num_runs` at a step, with its 95 % t-interval.

    None of a single run, and where all runs are equal: the interval would have no width, and few
    equal values say nothing of those to come.
    """

    step: int
    mean: float
    low: float | None
    high: float | None
    num_runs: int


def mean_curve(runs: Sequence[Mapping[int, float]]) -> list[Point]:
    """A point for each step that any of `runs` has a value at, over those that do, in order."""
    points = []
    for step in sorted({step for run in runs for step in run}):
        points.append(point(step, [run[step] for run in runs if step in run]))
    return points


def point(step: int, values: Sequence[float]) -> Point:
    """One point; of a single value, or equal ones, the spread is not known."""
    mean, low, high = mean_interval(values, bounds=None)
    several = max(values) > min(values)
    return Point(step, mean, low if several else None, high if several else None, len(values))
