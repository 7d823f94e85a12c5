"""Line charts as SVG, for pages in light and dark: text and colours follow the reader's theme.

Colours are CSS variables, which `STYLE` defines for both themes. A chart alone in a file carries
the style itself; a page has it once.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from posttrain.core.analysis.pictures import (
    BLACK,
    BLUE,
    COLOURS,
    GOLD,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    SKY,
    Panel,
    Series,
    smoothed,
)

_THEMES = {
    "ink": ("#1a1a1a", "#e6e6e6"),
    "soft": ("#5c5c5c", "#a0a0a0"),
    "grid": ("#e2e2e2", "#383c42"),
    "ground": ("#ffffff", "#16181c"),
    "black": (BLACK, "#e6e6e6"),
    "blue": (BLUE, "#4ea3e0"),
    "orange": (ORANGE, "#f08a4b"),
    "green": (GREEN, "#2fc39b"),
    "pink": (PINK, "#e39ac6"),
    "sky": (SKY, "#8ccdf5"),
    "gold": (GOLD, "#d9a832"),
    "grey": (GREY, "#9a9a9a"),
    "alarm": ("#b00020", "#ff6b7d"),
}
"""Each variable's colour in light and in dark."""
_NAMES = {light: name for name, (light, _) in _THEMES.items()}
_LIGHT, _DARK = (
    ";".join(f"--{name}:{colours[theme]}" for name, colours in _THEMES.items()) for theme in (0, 1)
)
STYLE = (
    f":root{{{_LIGHT}}}@media(prefers-color-scheme:dark){{:root{{{_DARK}}}}}"
    "svg text{font:12px system-ui,'DejaVu Sans',sans-serif;fill:var(--soft)}"
    "svg .name{fill:var(--ink);font-weight:600;font-size:13px}"
    "svg .grid{stroke:var(--grid)}svg .axis{stroke:var(--soft)}"
    "svg .mark{fill:var(--alarm);opacity:.13}svg .first{stroke:var(--alarm);stroke-dasharray:4 3}"
    "svg .badge{fill:var(--alarm)}svg text.number{fill:var(--ground);font-weight:700}"
)
POINTS = 600
"""Points of a line that are drawn: more than a chart has pixels would only make the page large."""
FLAT = 1e-9
"""Values that differ by less, as a share of themselves, are drawn as one."""
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 40


@dataclass(frozen=True, slots=True)
class Mark:
    """Steps to point out, under a number; the first of them has a line and a badge."""

    number: int
    steps: Sequence[int]


@dataclass(frozen=True, slots=True)
class Chart:
    """How a panel is drawn. `log_x` and `log_y` are for values above 0.

    `number` makes ids unique on a page. With `robust` single values far outside the others neither
    set the scale nor lift the line. Without `smooth` lines go through every value.
    """

    panel: Panel
    marks: Sequence[Mark] = ()
    number: int = 0
    width: int = 580
    height: int = 250
    x: str = "optimizer step"
    span: tuple[float, float] | None = None
    log_x: bool = False
    log_y: bool = False
    robust: bool = False
    smooth: bool = True


@dataclass(frozen=True, slots=True)
class Scale:
    """Values onto pixels, in a straight line or by their logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(max(value, 1e-300))
        return self.start + (self.end - self.start) * (at - low) / ((high - low) or 1.0)

    def ticks(self, count: int = 5) -> list[float]:
        """Round values within the scale."""
        if self.high == self.low:
            return [self.low]
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            most = max(1, math.ceil(len(powers) / (count + 2)))
            found = [10.0**p for p in powers[::most]]
            if len(powers) <= 3:
                found = [m * 10.0**p for p in powers for m in (1, 2, 5)]
            return [t for t in found if self.low * 0.999 <= t <= self.high * 1.001]
        rough = (self.high - self.low) / count
        power = 10.0 ** math.floor(math.log10(rough))
        each = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
        first = math.ceil(self.low / each - 1e-9)
        last = math.floor(self.high / each + 1e-9)
        return [i * each for i in range(first, last + 1)]


def thinned(steps: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """At most about POINTS points: of each stretch its smallest and its largest value."""
    if len(steps) <= POINTS:
        return list(steps), list(values)
    stretch, kept = math.ceil(2 * len(steps) / POINTS), set[int]()
    for start in range(0, len(steps), stretch):
        part = range(start, min(start + stretch, len(steps)))
        kept |= {min(part, key=values.__getitem__), max(part, key=values.__getitem__)}
    kept |= {0, len(steps) - 1}
    places = sorted(kept)
    return [steps[i] for i in places], [values[i] for i in places]


def colour_of(series: Series, index: int) -> str:
    """The CSS variable of a line's colour."""
    return f"var(--{_NAMES.get(series.colour or COLOURS[index % len(COLOURS)], 'blue')})"


def chart_svg(chart: Chart, *, alone: bool = False) -> str:
    """The chart; `alone` for a file of its own, with style, title and legend."""
    top = TOP + (20 * (1 + _legend_rows(chart)) if alone else 0)
    x = Scale(*_x_span(chart), LEFT, chart.width - RIGHT, chart.log_x)
    y = Scale(*_y_span(chart), chart.height + top - TOP - BOTTOM, top, chart.log_y)
    height = chart.height + top - TOP
    label = html.escape(f"{chart.panel.title}, {chart.panel.unit}")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {chart.width} {height}" '
        f'role="img" aria-label="{label}">'
    ]
    if alone:
        parts += [
            f"<style>{STYLE}</style>",
            f'<rect width="{chart.width}" height="{height}" fill="var(--ground)"/>',
            f'<text class="name" x="{LEFT}" y="18">{html.escape(chart.panel.title)}</text>',
            *_legend(chart),
        ]
    parts += _axes(chart, x, y)
    if chart.panel.series:
        clip = f"area{chart.number}"
        width, tall = chart.width - LEFT - RIGHT, y.start - y.end
        parts.append(
            f'<clipPath id="{clip}"><rect x="{LEFT}" y="{y.end - 3:.1f}" width="{width}" '
            f'height="{tall + 6:.1f}"/></clipPath>'
        )
        parts += [piece for mark in chart.marks for piece in _mark(mark, x, y)]
        parts.append(f'<g clip-path="url(#{clip})">')
        for index, series in enumerate(chart.panel.series):
            parts += _line(series, colour_of(series, index), x, y, chart)
        parts.append("</g>")
        parts += _badges(chart.marks, x, y)
    else:
        middle = (LEFT + chart.width - RIGHT) / 2
        parts.append(f'<text x="{middle}" y="{(y.start + y.end) / 2}">not recorded</text>')
    return "".join([*parts, "</svg>"])


# --- scales --------------------------------------------------------------------------------------


def _x_span(chart: Chart) -> tuple[float, float]:
    steps = [step for series in chart.panel.series for step in series.steps]
    if chart.span is not None:
        return chart.span
    return (min(steps), max(steps)) if steps else (0.0, 1.0)


def _y_span(chart: Chart) -> tuple[float, float]:
    """From the smallest value to the largest, bounds included, and some room; 0 if it is near."""
    values = [value for series in chart.panel.series for value in _all_values(series)]
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    if high - low <= FLAT * abs(high):
        low = high  # rounding: ticks would all read alike
    if chart.robust and len(values) >= 20:
        ordered = sorted(values)
        inner = ordered[-1 - len(ordered) // 100]
        high = min(high, inner + 1.5 * (inner - low)) if inner > low else high
    if chart.log_y:
        return low, 1.3 * high if high > low else 10 * low
    if 0 <= low < 0.6 * high:
        low = 0.0
    room = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return (low if low == 0 else low - room), high + room


def _all_values(series: Series) -> Iterable[float]:
    for part in (series.values, series.low or (), series.high or ()):
        yield from (value for value in part if value is not None and math.isfinite(value))


# --- pieces --------------------------------------------------------------------------------------


def _axes(chart: Chart, x: Scale, y: Scale) -> list[str]:
    parts, bottom, ticks = [], y.start, y.ticks()
    for tick, number in zip(ticks, tick_numbers(ticks), strict=True):
        at = y(tick)
        parts.append(
            f'<line class="grid" x1="{x.start}" x2="{x.end}" y1="{at:.1f}" y2="{at:.1f}"/>'
        )
        parts.append(f'<text x="{x.start - 6}" y="{at + 4:.1f}" text-anchor="end">{number}</text>')
    for tick in x.ticks(8):
        place = f'x="{x(tick):.1f}" y="{bottom + 16:.1f}" text-anchor="middle"'
        parts.append(f"<text {place}>{number_text(tick)}</text>")
    parts.append(
        f'<line class="axis" x1="{x.start}" x2="{x.end}" y1="{bottom:.1f}" y2="{bottom:.1f}"/>'
    )
    parts.append(
        f'<text x="{x.end}" y="{bottom + 32:.1f}" text-anchor="end">{html.escape(chart.x)}</text>'
    )
    parts.append(
        f'<text x="{x.start}" y="{bottom + 32:.1f}">{html.escape(chart.panel.unit)}</text>'
    )
    return parts


def number_text(value: float, digits: int = 4) -> str:
    """A number with so many significant digits; very small and very large ones as 1e-5, 2e6."""
    if value and (abs(value) < 1e-3 or abs(value) >= 1e5):
        mantissa, _, power = f"{value:.{min(digits, 2) - 1}e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(power)}"
    if abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


def tick_numbers(ticks: Sequence[float]) -> list[str]:
    """The ticks with as many digits as tell them apart."""
    for digits in range(4, 12):
        found = [number_text(tick, digits) for tick in ticks]
        if len(set(found)) == len(ticks):
            break
    return found if ticks else []


def _path(steps: Sequence[float], values: Sequence[float], x: Scale, y: Scale) -> str:
    return " ".join(f"{x(s):.1f},{y(v):.1f}" for s, v in zip(steps, values, strict=True))


def _line(series: Series, colour: str, x: Scale, y: Scale, chart: Chart) -> list[str]:
    """Bounds, single values, and the line that they follow."""
    plain = series.low is not None or series.band or not chart.smooth
    smooth = None if plain else smoothed(series.values, robust=chart.robust)
    steps, values = thinned(series.steps, series.values)
    parts = _bounds(series, colour, x, y)
    if smooth is None:
        points = _path(steps, values, x, y)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"/>'
        )
        if len(steps) <= 40:
            parts += [
                f'<circle cx="{x(s):.1f}" cy="{y(v):.1f}" r="2.6" fill="{colour}"/>'
                for s, v in zip(steps, values, strict=True)
            ]
        return parts
    raw, line = _path(steps, values, x, y), _path(*thinned(series.steps, smooth), x, y)
    return [
        *parts,
        f'<polyline points="{raw}" fill="none" stroke="{colour}" stroke-width="1" opacity=".3"/>',
        f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>',
    ]


def _bounds(series: Series, colour: str, x: Scale, y: Scale) -> list[str]:
    """Whiskers for a few points, a band for many."""
    if series.low is None or series.high is None:
        return []
    known = [
        (s, low, high)
        for s, low, high in zip(series.steps, series.low, series.high, strict=True)
        if low is not None and high is not None
    ]
    if len(known) <= 25 and not series.band:
        return [
            f'<line x1="{x(s):.1f}" x2="{x(s):.1f}" y1="{y(low):.1f}" y2="{y(high):.1f}" '
            f'stroke="{colour}" opacity=".6"/>'
            for s, low, high in known
        ]
    around = [(s, high) for s, _, high in known] + [(s, low) for s, low, _ in reversed(known)]
    points = " ".join(f"{x(s):.1f},{y(bound):.1f}" for s, bound in around)
    return [f'<polygon points="{points}" fill="{colour}" opacity=".16"/>']


def _mark(mark: Mark, x: Scale, y: Scale) -> list[str]:
    """A rectangle over each stretch of steps."""
    parts, height = [], y.start - y.end
    for first, last in stretches(mark.steps):
        at, width = x(first - 0.5), max(2.0, x(last + 0.5) - x(first - 0.5))
        parts.append(
            f'<rect class="mark" x="{at:.1f}" y="{y.end:.1f}" width="{width:.1f}" '
            f'height="{height:.1f}"/>'
        )
    at = x(mark.steps[0])
    parts.append(
        f'<line class="first" x1="{at:.1f}" x2="{at:.1f}" y1="{y.end:.1f}" y2="{y.start:.1f}"/>'
    )
    return parts


def _badges(marks: Sequence[Mark], x: Scale, y: Scale) -> list[str]:
    """The numbers of marks at their first steps; one that would cover another is below it."""
    parts, placed = list[str](), list[tuple[float, float]]()
    for mark in marks:
        at, down = x(mark.steps[0]), y.end + 8
        while any(abs(at - a) < 17 and abs(down - d) < 17 for a, d in placed):
            down += 18
        placed.append((at, down))
        parts.append(f'<circle class="badge" cx="{at:.1f}" cy="{down:.1f}" r="8"/>')
        parts.append(
            f'<text class="number" x="{at:.1f}" y="{down + 4:.1f}" text-anchor="middle">'
            f"{mark.number}</text>"
        )
    return parts


def stretches(steps: Sequence[int]) -> list[tuple[int, int]]:
    """Steps that follow one another, as (first, last)."""
    found: list[tuple[int, int]] = []
    for step in steps:
        if found and step == found[-1][1] + 1:
            found[-1] = (found[-1][0], step)
        else:
            found.append((step, step))
    return found


def _legend_rows(chart: Chart) -> int:
    return max((row for row, _, _ in _legend_places(chart)), default=-1) + 1


def _legend_places(chart: Chart) -> list[tuple[int, float, Series]]:
    """(row, x, series): labels next to one another while they fit."""
    found, row, at = [], 0, float(LEFT)
    for series in chart.panel.series:
        width = 34 + 7.0 * len(series.label)
        if at > LEFT and at + width > chart.width:
            row, at = row + 1, float(LEFT)
        found.append((row, at, series))
        at += width
    return found


def _legend(chart: Chart) -> list[str]:
    parts = []
    for index, (row, at, series) in enumerate(_legend_places(chart)):
        down, colour = 38 + 20 * row, colour_of(series, index)
        parts.append(
            f'<line x1="{at:.0f}" x2="{at + 16:.0f}" y1="{down - 4}" y2="{down - 4}" '
            f'stroke="{colour}" stroke-width="3"/>'
        )
        parts.append(f'<text x="{at + 20:.0f}" y="{down}">{html.escape(series.label)}</text>')
    return parts
