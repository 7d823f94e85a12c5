"""Learning curves and before/after bars, each as a PNG and as one self-contained HTML page.

The page carries its own copy of plotly.js (about 5 MB): MLflow shows artifacts in a frame that can
load nothing else.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from posttrain.core.tracking.panels import (
    BLUE,
    SKY,
    Bar,
    Panel,
    Series,
    learning_panels,
    preference_panels,
)

if TYPE_CHECKING:  # loading matplotlib takes 0.5 s: functions do it when they draw
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150
GREY = "#7f7f7f"
TEXT, HEADING = 9.5, 11  # points
NOTE = "dots: each step; lines from ten steps on: mean of the nearest steps"


def learning_curves(
    history: Sequence[Mapping[str, float]],
    evaluations: Sequence[Mapping[str, float]],
    title: str,
    folder: Path,
    stem: str = "learning_curves",
) -> list[Path]:
    """Write `folder`/`stem`.png and .html: reward, accuracy, entropy, length, KL, clipping.

    Rows hold "step" and metrics by name. `evaluations` draws eval/greedy_accuracy with the bars
    from eval/greedy_low to eval/greedy_high. Returns both paths, the PNG first.
    """
    return _curves(learning_panels(history, evaluations), title, folder, stem)


def preference_curves(
    history: Sequence[Mapping[str, float]],
    rankings: Sequence[Mapping[str, float]],
    title: str,
    folder: Path,
    stem: str = "learning_curves",
) -> list[Path]:
    """The same for learning from preferences: loss, ranking, rewards, log-probs, both falling.

    `rankings` draws pref/held_out_pair_accuracy (or _row_accuracy) with its bars.
    """
    return _curves(preference_panels(history, rankings), title, folder, stem)


def _curves(panels: Sequence[Panel], title: str, folder: Path, stem: str) -> list[Path]:
    png, page = folder / f"{stem}.png", folder / f"{stem}.html"
    folder.mkdir(parents=True, exist_ok=True)
    _save(_curves_figure(panels, title), png)
    page.write_text(_page(_curves_page(panels), title, NOTE))
    return [png, page]


def before_after(
    results: Sequence[tuple[str, float, float, float]],
    title: str,
    folder: Path,
    stem: str = "before_after",
) -> list[Path]:
    """Write `folder`/`stem`.png and .html: a bar per (label, accuracy, low, high), as fractions.

    The first bar is the starting point and grey, the last one the result. Returns both paths.
    """
    bars = [Bar(*result) for result in results]
    png, page = folder / f"{stem}.png", folder / f"{stem}.html"
    folder.mkdir(parents=True, exist_ok=True)
    _save(_bars_figure(bars, title), png)
    page.write_text(_page(_bars_page(bars), title, "whiskers: 95 % intervals"))
    return [png, page]


def _save(figure: Figure, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=DPI, format="png")


# --- PNG -----------------------------------------------------------------------------------------


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=TEXT)


def _draw(axes: Axes, series: Series) -> None:
    reach = series.reach()
    if reach is not None:
        axes.errorbar(
            series.steps,
            series.values,
            yerr=reach,
            fmt="o-",
            color=series.colour,
            markersize=5,
            capsize=3,
            linewidth=1.2,
            label=series.label,
        )
        return
    smooth = series.smooth()
    if smooth is None:
        axes.plot(
            series.steps, series.values, "o-", ms=3.5, color=series.colour, label=series.label
        )
        return
    axes.plot(series.steps, series.values, "o", ms=2.6, mew=0, alpha=0.35, color=series.colour)
    axes.plot(series.steps, smooth, color=series.colour, linewidth=1.8, label=series.label)


def _curves_figure(panels: Sequence[Panel], title: str) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 9.6), layout="constrained")
    figure.suptitle(title, fontsize=14, fontweight="bold")
    grid = figure.subplots(3, 2)
    for axes, panel in zip(grid.flat, panels, strict=True):
        axes.set_title(panel.title, loc="left", fontsize=HEADING, fontweight="bold")
        axes.set_ylabel(panel.unit, fontsize=TEXT)
        axes.set_xlabel("optimizer step", fontsize=TEXT)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _tidy(axes)
        for series in panel.series:
            _draw(axes, series)
        if panel.series:
            axes.legend(frameon=False, fontsize=8.5)
        else:
            axes.text(0.5, 0.5, "not recorded", ha="center", transform=axes.transAxes)
            axes.set(xticks=[], yticks=[])
    figure.supxlabel(NOTE, fontsize=8.5, color="#555555")
    return figure


def _bar_colours(count: int) -> list[str]:
    return [GREY, *[SKY] * (count - 2), BLUE][:count] if count > 1 else [BLUE] * count


def _bars_figure(bars: Sequence[Bar], title: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.8), layout="constrained")
    axes = figure.subplots()
    places = range(len(bars))
    values = [100 * bar.value for bar in bars]
    error = [[bar.reach()[side] for bar in bars] for side in (0, 1)]
    axes.bar(places, values, width=0.55, color=_bar_colours(len(bars)))
    axes.errorbar(places, values, yerr=error, fmt="none", ecolor="#222222", capsize=5)
    for place, bar in zip(places, bars, strict=True):
        axes.text(place, 100 * bar.high + 2, _bar_text(bar), ha="center", fontsize=9)
    axes.set_xticks(list(places), [bar.label for bar in bars])
    axes.set_ylim(0, max(50.0, *(100 * bar.high + 16 for bar in bars)))
    axes.set_ylabel("held-out accuracy (%)", fontsize=TEXT)
    axes.set_title(title, loc="left", fontsize=HEADING, fontweight="bold")
    _tidy(axes)
    return figure


def _bar_text(bar: Bar) -> str:
    return f"{100 * bar.value:.1f} %\n({100 * bar.low:.1f} to {100 * bar.high:.1f})"


# --- HTML ----------------------------------------------------------------------------------------


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.35)"


def _traces(series: Series, group: str) -> list[go.Scatter]:
    shared = {"x": list(series.steps), "legend": group, "name": series.label}
    values = list(series.values)
    reach = series.reach()
    if reach is not None:
        bars = {"arrayminus": reach[0], "array": reach[1]}
        marks = {"color": series.colour, "size": 7}
        return [go.Scatter(**shared, y=values, error_y=bars, marker=marks, mode="lines+markers")]
    smooth = series.smooth()
    if smooth is None:
        look = {"color": series.colour, "size": 5}
        return [go.Scatter(**shared, y=values, marker=look, mode="lines+markers")]
    return [
        go.Scatter(
            **shared,
            y=values,
            mode="markers",
            showlegend=False,
            marker={"color": _faint(series.colour), "size": 5},
        ),
        go.Scatter(**shared, y=smooth, mode="lines", line={"color": series.colour, "width": 2}),
    ]


def _curves_page(panels: Sequence[Panel]) -> go.Figure:
    titles = [f"<b>{html.escape(panel.title)}</b>" for panel in panels]
    figure = make_subplots(
        rows=3, cols=2, subplot_titles=titles, vertical_spacing=0.14, horizontal_spacing=0.1
    )
    figure.update_annotations(yshift=22)
    for index, panel in enumerate(panels):
        row, column = index // 2 + 1, index % 2 + 1
        group = f"legend{index + 1}" if index else "legend"
        for series in panel.series:
            figure.add_traces(_traces(series, group), rows=row, cols=column)
        figure.update_yaxes(title_text=panel.unit, row=row, col=column)
        figure.update_xaxes(title_text="optimizer step", row=row, col=column)
        axis = figure.get_subplot(row, column)
        # Between title and panel, where no curve can be.
        place = {"x": axis.xaxis.domain[0], "y": axis.yaxis.domain[1], "yanchor": "bottom"}
        look = {"orientation": "h", "font": {"size": 11}}
        figure.update_layout({group: place | look})
        if not panel.series:
            figure.add_annotation(
                text="not recorded", showarrow=False, x=0.5, y=0.5, row=row, col=column
            )
    figure.update_layout(height=1180)
    return figure


def _bars_page(bars: Sequence[Bar]) -> go.Figure:
    error = {
        "arrayminus": [bar.reach()[0] for bar in bars],
        "array": [bar.reach()[1] for bar in bars],
        "color": "#222222",
    }
    # Places, not labels, on the axis: two bars of one label would be drawn over one another.
    places = list(range(len(bars)))
    values = [100 * bar.value for bar in bars]
    colours = _bar_colours(len(bars))
    figure = go.Figure(
        go.Bar(x=places, y=values, error_y=error, marker={"color": colours}, width=0.55)
    )
    for place, bar in zip(places, bars, strict=True):
        text = _bar_text(bar).replace("\n", "<br>")
        figure.add_annotation(x=place, y=100 * bar.high, text=text, showarrow=False, yshift=22)
    labels = [html.escape(bar.label) for bar in bars]
    figure.update_xaxes(tickvals=places, ticktext=labels)
    top = max(50.0, *(100 * bar.high + 14 for bar in bars))
    figure.update_yaxes(title_text="held-out accuracy (%)", range=[0, top])
    figure.update_layout(height=480, showlegend=False)
    return figure


def _page(figure: go.Figure, title: str, note: str) -> str:
    figure.update_layout(
        title={"text": f"<b>{html.escape(title)}</b><br><sub>{note}</sub>", "x": 0.02},
        template="plotly_white",
        font={"family": "system-ui, 'DejaVu Sans', sans-serif", "size": 13},
        margin={"l": 70, "r": 20, "t": 160, "b": 50},
    )
    config = {"displaylogo": False, "responsive": True}
    page: str = figure.to_html(include_plotlyjs=True, include_mathjax=False, config=config)
    return page
