"""Small charts of reports, as PNG, drawn as the learning curves are."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

DPI = 110
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
"""Told apart by people who see colours differently (Okabe and Ito)."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A line over steps with an optional band, which ends where `low` or `high` is None."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()


def curves(panels: Mapping[str, Sequence[Curve]], columns: int = 2) -> bytes:
    """A panel of curves per name, `columns` beside one another, over the step."""
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5.2 * columns, 2.9 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, (name, lines) in zip(grid.flat, panels.items(), strict=False):
        _tidy(axes, name, "step", "")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        for index, line in enumerate(lines):
            colour = COLOURS[index % len(COLOURS)]
            axes.plot(line.steps, line.values, "o-", ms=3, lw=1.4, color=colour, label=line.label)
            _band(axes, line, colour)
        if lines:
            axes.legend(frameon=False, fontsize=7.5)
    return _png(figure)


def _band(axes: Axes, line: Curve, colour: str) -> None:
    if line.low and line.high:
        low, high = (
            [math.nan if value is None else value for value in side]  # where the band breaks off
            for side in (line.low, line.high)
        )
        axes.fill_between(line.steps, low, high, color=colour, alpha=0.15, linewidth=0)


def scatter(
    groups: Mapping[str, tuple[Sequence[float], Sequence[float]]], title: str, x: str, y: str
) -> bytes:
    """Points (x, y) in a colour per group; the line of equal values is grey."""
    figure = Figure(figsize=(6, 4.6), layout="constrained")
    axes = figure.subplots()
    _tidy(axes, title, x, y)
    for index, (label, (xs, ys)) in enumerate(groups.items()):
        axes.plot(xs, ys, "o", ms=4, alpha=0.6, color=COLOURS[index % len(COLOURS)], label=label)
    axes.axline((0, 0), slope=1, color="#b0b0b0", linewidth=0.8, zorder=0)
    if groups:
        axes.legend(frameon=False, fontsize=8)
    return _png(figure)


def bars(groups: Mapping[str, Mapping[str, float]], title: str, y: str) -> bytes:
    """A cluster of bars per group, a bar per name in it; what a group lacks has none."""
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    _tidy(axes, title, "", y)
    names = list(dict.fromkeys(name for values in groups.values() for name in values))
    width = 0.8 / max(1, len(names))
    for index, name in enumerate(names):
        places = [i for i, values in enumerate(groups.values()) if name in values]
        heights = [values[name] for values in groups.values() if name in values]
        colour = COLOURS[index % len(COLOURS)]
        axes.bar([p + index * width for p in places], heights, width, color=colour, label=name)
    middle = width * (len(names) - 1) / 2
    axes.set_xticks([i + middle for i in range(len(groups))], list(groups), fontsize=8)
    axes.tick_params(axis="x", rotation=20)
    if names:
        axes.legend(frameon=False, fontsize=8)
    return _png(figure)


def histogram(series: Mapping[str, Sequence[float]], title: str, x: str, bins: int = 30) -> bytes:
    """Outlines of how often values occur, on one set of `bins` for all series."""
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    _tidy(axes, title, x, "count")
    values = [value for one in series.values() for value in one]
    span = (min(values), max(values)) if values else (0.0, 1.0)
    if span[0] == span[1]:
        span = (span[0] - 0.5, span[1] + 0.5)
    for index, (label, one) in enumerate(series.items()):
        colour = COLOURS[index % len(COLOURS)]
        axes.hist(one, bins=bins, range=span, histtype="step", lw=1.5, color=colour, label=label)
    if series:
        axes.legend(frameon=False, fontsize=8)
    return _png(figure)


def _tidy(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(_literal(title), loc="left", fontsize=10, fontweight="bold")
    axes.set_xlabel(_literal(x), fontsize=8.5)
    axes.set_ylabel(_literal(y), fontsize=8.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8)


def _literal(text: str) -> str:
    """Dollar signs are not mathematics here."""
    return text.replace("$", r"\$")


def _png(figure: Figure) -> bytes:
    FigureCanvasAgg(figure)
    stream = io.BytesIO()
    figure.savefig(stream, dpi=DPI, format="png")
    return stream.getvalue()
