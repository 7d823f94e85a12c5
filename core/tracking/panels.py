"""What the charts show, apart from how they are drawn: panels of series, from metric histories."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Okabe and Ito's palette: told apart with every common colour-vision deficiency.
BLACK, BLUE, ORANGE, GREEN, PINK, SKY, GOLD = (
    "#222222",
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#B8860B",
)
COMPONENT = "reward/component/"
HUGE = 1e300  # MLflow stores an infinity as the largest float: neither can be drawn


@dataclass(frozen=True, slots=True)
class Series:
    """One line: `steps` and `values` of equal length; `low` and `high` make 95 % bars instead."""

    label: str
    colour: str
    steps: Sequence[float]
    values: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None

    def reach(self) -> tuple[list[float], list[float]] | None:
        """How far the bars go below and above the values; never negative, whatever rounding did."""
        if self.low is None or self.high is None:
            return None
        below = [max(0.0, v - b) for v, b in zip(self.values, self.low, strict=True)]
        above = [max(0.0, b - v) for v, b in zip(self.values, self.high, strict=True)]
        return below, above

    def smooth(self) -> list[float] | None:
        """Mean of the nearest values, a window of about a tenth of the run; None for few values."""
        count = len(self.values)
        if count < 10:
            return None
        reach = max(1, count // 20)
        windows = [self.values[max(0, i - reach) : i + reach + 1] for i in range(count)]
        return [sum(window) / len(window) for window in windows]


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart with its unit; without series it says that nothing was recorded."""

    title: str
    unit: str
    series: tuple[Series, ...]


@dataclass(frozen=True, slots=True)
class Bar:
    """One measured accuracy with its 95 % interval, all as fractions."""

    label: str
    value: float
    low: float
    high: float

    def reach(self) -> tuple[float, float]:
        """How far the interval goes below and above the value, in percent; never negative."""
        return 100 * max(0.0, self.value - self.low), 100 * max(0.0, self.high - self.value)


def line(
    history: Sequence[Mapping[str, float]], key: str, label: str, colour: str
) -> tuple[Series, ...]:
    """The finite values of `key` by step, as no series or one."""
    points = [
        (row["step"], row[key])
        for row in history
        if key in row and math.isfinite(row[key]) and abs(row[key]) < HUGE
    ]
    if not points:
        return ()
    steps, values = zip(*points, strict=True)
    return (Series(label, colour, steps, values),)


def _with_bars(
    rows: Sequence[Mapping[str, float]], key: str, bounds: str, label: str
) -> tuple[Series, ...]:
    """`key` by step with bars from `bounds`_low to `bounds`_high, as no series or one."""
    keys = ("step", key, f"{bounds}_low", f"{bounds}_high")
    points = [[row[key] for key in keys] for row in rows if all(k in row for k in keys)]
    if not points:
        return ()
    steps, values, low, high = zip(*points, strict=True)
    return (Series(label, ORANGE, steps, values, low, high),)


def learning_panels(
    history: Sequence[Mapping[str, float]], evaluations: Sequence[Mapping[str, float]]
) -> list[Panel]:
    """The six panels of a learning curve.

    Rows of `history` and `evaluations` hold "step" and metrics by name; missing ones leave gaps.
    """
    names = sorted({key for row in history for key in row if key.startswith(COMPONENT)})
    colours = (SKY, GOLD, PINK, GREEN, BLUE, ORANGE)
    components = [
        line(history, name, name.removeprefix(COMPONENT), colours[i % len(colours)])
        for i, name in enumerate(names)
        if len(names) > 1  # a single component is the total
    ]
    return [
        Panel(
            "Reward",
            "reward",
            sum(components, ()) + line(history, "reward/mean", "total", BLACK),
        ),
        Panel(
            "Accuracy",
            "fraction correct",
            line(history, "acc/mean", "training batch, sampled", BLUE)
            + _with_bars(
                evaluations,
                "eval/greedy_accuracy",
                "eval/greedy",
                "held-out, greedy, 95 % interval",
            ),
        ),
        Panel("Entropy", "nats per token", line(history, "entropy/mean", "policy", BLUE)),
        Panel(
            "Response length",
            "tokens",
            line(history, "resp_len/max", "longest", SKY)
            + line(history, "resp_len/mean", "mean", BLUE),
        ),
        Panel(
            "KL divergence (k3)",
            "nats per token",
            line(history, "kl/old_k3", "from the rollout's policy", BLUE)
            + line(history, "kl/ref_k3", "from the reference", ORANGE)
            + line(history, "mismatch/k3", "engine against trainer", GREEN),
        ),
        Panel(
            "Clipped tokens",
            "fraction of tokens",
            line(history, "clip/high_frac", "upper bound", ORANGE)
            + line(history, "clip/low_frac", "lower bound", BLUE),
        ),
    ]


def preference_panels(
    history: Sequence[Mapping[str, float]], rankings: Sequence[Mapping[str, float]]
) -> list[Panel]:
    """The six panels of learning from preferences; rows as in `learning_panels`."""
    held_out = "held-out, 95 % interval"
    return [
        Panel("Loss", "loss", line(history, "loss/preference", "training batch", BLUE)),
        Panel(
            "Answers ranked right",
            "fraction",
            line(history, "rewards/accuracy", "training batch, pairs", BLUE)
            + _with_bars(rankings, "pref/held_out_pair_accuracy", "pref/held_out", held_out)
            + _with_bars(rankings, "pref/held_out_row_accuracy", "pref/held_out", held_out),
        ),
        Panel(
            "Implied reward",
            "reward",
            line(history, "rewards/chosen", "chosen", BLUE)
            + line(history, "rewards/rejected", "rejected", ORANGE),
        ),
        Panel(
            "Log-prob of the answers",
            "nats per token",
            line(history, "logps/chosen_per_token", "chosen", BLUE)
            + line(history, "logps/rejected_per_token", "rejected", ORANGE),
        ),
        _away_from_reference(history),
        Panel("Gradient norm", "L2 norm", line(history, "grad/norm", "before clipping", BLUE)),
    ]


def _away_from_reference(history: Sequence[Mapping[str, float]]) -> Panel:
    """How often both answers of a pair fall; single answers have no pair, but move as well."""
    falling = line(history, "pref/both_falling", "training batch", BLUE)
    if falling:
        title = "Both answers less likely than under the reference"
        return Panel(title, "fraction of pairs", falling)
    return Panel(
        "Log-prob of the answers, less the reference's",
        "nats per answer",
        line(history, "logps/chosen_delta", "chosen", BLUE)
        + line(history, "logps/rejected_delta", "rejected", ORANGE),
    )
