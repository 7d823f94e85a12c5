"""Charts as PNG: curves over steps, accuracies, scatter, bars, histograms."""

from __future__ import annotations

import io
import math
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # loading matplotlib takes 0.5 s: functions load it when they draw
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


DPI = 130
# Okabe and Ito's palette: distinguishable with every common colour-vision deficiency.
BLACK, BLUE, ORANGE, GREEN, PINK, SKY, GOLD, GREY = (
    "#222222",
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#B8860B",
    "#7f7f7f",
)
COLOURS = (BLUE, ORANGE, GREEN, PINK, GOLD, SKY, GREY)
NOTE = "dots: each step; lines from ten steps on: mean of the nearest steps"


@dataclass(frozen=True, slots=True)
class Series:
    """One line over steps. Without a colour it takes the next of the palette.

    `low` and `high` are drawn as bars, or as a band that ends where either is None.
    """

    label: str
    colour: str
    steps: Sequence[float]
    values: Sequence[float]
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None
    band: bool = False

    def reach(self) -> tuple[list[float], list[float]] | None:
        """How far the bars go below and above the values; never negative, whatever rounding did."""
        if self.low is None or self.high is None or self.band:
            return None
        below, above = (
            [
                0.0 if bound is None else max(0.0, sign * (value - bound))
                for value, bound in zip(self.values, side, strict=True)
            ]
            for sign, side in ((1, self.low), (-1, self.high))
        )
        return below, above

    def smooth(self) -> list[float] | None:
        """Mean of the nearest values, a window of about a tenth of the run; None for few values."""
        return None if self.band else smoothed(self.values)


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart with its unit; without series it says that nothing was recorded."""

    title: str
    unit: str
    series: Sequence[Series]


def smoothed(values: Sequence[float], *, robust: bool = False) -> list[float] | None:
    """Mean of the nearest values, a window of a tenth of them; None for fewer than ten.

    With `robust` their median: a single value far outside does not lift the values around it.
    """
    count = len(values)
    if count < 10:
        return None
    reach = max(1, count // 20)
    ends = [(max(0, i - reach), min(count, i + reach + 1)) for i in range(count)]
    if robust:
        return _medians(values, ends)
    sums = list(accumulate(values, initial=0.0))
    return [(sums[high] - sums[low]) / (high - low) for low, high in ends]


def _medians(values: Sequence[float], ends: Sequence[tuple[int, int]]) -> list[float]:
    """Medians of windows that only move forward."""
    window, found, first, last = list[float](), list[float](), 0, 0
    for low, high in ends:
        for value in values[last:high]:
            insort(window, value)
        for value in values[first:low]:
            del window[bisect_left(window, value)]
        first, last = low, high
        found.append(window[len(window) // 2])
    return found


def curves(panels: Sequence[Panel], title: str = "") -> bytes:
    """The panels over the step, two next to one another."""
    rows = -(-len(panels) // 2)
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    # Fixed margins, in inches: a layout by the size of each text draws the figure twice.
    width, height = 9.0, 3.2 * rows + (0.7 if title else 0.0)
    top, bottom = (0.85, 0.85) if title else (0.5, 0.6)
    figure = Figure(figsize=(width, height))
    if title:
        figure.suptitle(_literal(title), y=1 - 0.15 / height, fontsize=14, fontweight="bold")
        figure.supxlabel(NOTE, y=0.12 / height, fontsize=8.5, color="#555555")
    grid = figure.subplots(rows, 2, squeeze=False)
    figure.subplots_adjust(
        left=0.8 / width,
        right=1 - 0.15 / width,
        top=1 - top / height,
        bottom=bottom / height,
        wspace=0.22,
        hspace=0.38,
    )
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, panel in zip(grid.flat, panels, strict=False):
        _tidy(axes, panel.title, "optimizer step", panel.unit)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        for index, series in enumerate(panel.series):
            _draw(axes, series, series.colour or COLOURS[index % len(COLOURS)])
        if not panel.series:
            axes.text(0.5, 0.5, "not recorded", ha="center", transform=axes.transAxes)
            axes.set(xticks=[], yticks=[])
        _legend(axes)
    return _png(figure)


def _draw(axes: Axes, series: Series, colour: str) -> None:
    steps, values = series.steps, series.values
    reach, smooth = series.reach(), series.smooth()
    if reach is not None:
        axes.errorbar(
            steps, values, reach, fmt="o-", ms=5, capsize=3, lw=1.2, color=colour,
            label=series.label,
        )  # fmt: skip
    elif smooth is not None:
        axes.plot(steps, values, "o", ms=2.6, mew=0, alpha=0.35, color=colour)
        axes.plot(steps, smooth, color=colour, lw=1.8, label=series.label)
    else:
        axes.plot(steps, values, "o-", ms=3.5, color=colour, label=series.label)
    if series.band and series.low and series.high:
        low, high = (
            [math.nan if value is None else value for value in side]
            for side in (series.low, series.high)
        )
        axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)


def accuracies(results: Sequence[tuple[str, float, float, float]], title: str) -> bytes:
    """A bar for each (label, accuracy, low, high); the first is the starting point, the last blue.

    All are fractions.
    """
    figure, axes = _one(title, "", "held-out accuracy (%)", (9, 4.8))
    places = range(len(results))
    colours = [GREY, *[SKY] * (len(results) - 2), BLUE][-len(results) :]
    values = [100 * value for _, value, _, _ in results]
    below = [100 * max(0.0, value - low) for _, value, low, _ in results]
    above = [100 * max(0.0, high - value) for _, value, _, high in results]
    axes.bar(places, values, width=0.55, color=colours)
    axes.errorbar(places, values, [below, above], fmt="none", ecolor="#222222", capsize=5)
    for place, (_, value, low, high) in enumerate(results):
        text = f"{100 * value:.1f} %\n({100 * low:.1f} to {100 * high:.1f})"
        axes.text(place, 100 * high + 2, text, ha="center", fontsize=9)
    axes.set_xticks(list(places), [row[0] for row in results])
    axes.set_ylim(0, max(50.0, *(100 * high + 16 for _, _, _, high in results)))
    return _png(figure)


def scatter(
    groups: Mapping[str, tuple[Sequence[float], Sequence[float]]], title: str, x: str, y: str
) -> bytes:
    """Points (x, y) in a colour per group; the line of equal values is grey."""
    figure, axes = _one(title, x, y)
    for index, (label, (xs, ys)) in enumerate(groups.items()):
        axes.plot(xs, ys, "o", ms=4, alpha=0.6, color=COLOURS[index % len(COLOURS)], label=label)
    axes.axline((0, 0), slope=1, color="#b0b0b0", linewidth=0.8, zorder=0)
    _legend(axes)
    return _png(figure)


def bars(groups: Mapping[str, Mapping[str, float]], title: str, y: str) -> bytes:
    """A cluster of bars per group, a bar per name in it; what a group lacks has none."""
    figure, axes = _one(title, "", y)
    names = list(dict.fromkeys(name for values in groups.values() for name in values))
    width = 0.8 / max(1, len(names))
    for index, name in enumerate(names):
        places = [i + index * width for i, values in enumerate(groups.values()) if name in values]
        heights = [values[name] for values in groups.values() if name in values]
        axes.bar(places, heights, width, color=COLOURS[index % len(COLOURS)], label=name)
    middle = width * (len(names) - 1) / 2
    axes.set_xticks([i + middle for i in range(len(groups))], list(groups), fontsize=8)
    axes.tick_params(axis="x", rotation=20)
    _legend(axes)
    return _png(figure)


def histogram(series: Mapping[str, Sequence[float]], title: str, x: str) -> bytes:
    """Outlines of how often values occur, on the same 30 bins for all series."""
    figure, axes = _one(title, x, "count")
    values = [value for one in series.values() for value in one] or [0.0, 1.0]
    span = (min(values), max(values))
    if span[0] == span[1]:
        span = (span[0] - 0.5, span[1] + 0.5)
    for index, (label, one) in enumerate(series.items()):
        colour = COLOURS[index % len(COLOURS)]
        axes.hist(one, bins=30, range=span, histtype="step", lw=1.5, color=colour, label=label)
    _legend(axes)
    return _png(figure)


def _one(title: str, x: str, y: str, size: tuple[float, float] = (6.4, 4.2)) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    _tidy(axes, title, x, y)
    return figure, axes


def _tidy(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(_literal(title), loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel(_literal(x), fontsize=9)
    axes.set_ylabel(_literal(y), fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8.5)


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8)


def _literal(text: str) -> str:
    """Text in which dollar signs do not begin mathematics."""
    return text.replace("$", r"\$")


def _png(figure: Figure) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    stream = io.BytesIO()
    figure.savefig(stream, dpi=DPI, format="png")
    return stream.getvalue()
