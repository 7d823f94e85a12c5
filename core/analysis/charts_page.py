"""A page of line charts that loads nothing, in light and dark.

The pointer shows all values of a step, in all charts at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from posttrain.core.analysis.pictures import Panel
from posttrain.core.analysis.report import escaped, html_page, plain
from posttrain.core.analysis.svg import STYLE, Chart, chart_svg, colour_of, number_text, thinned

NOTE = (
    "Faint lines: every step; strong lines from ten steps on: mean of the nearest tenth. Bars and "
    "bands: 95 % intervals."
)


@dataclass(frozen=True, slots=True)
class Section:
    """Charts under a heading, or without one."""

    charts: Sequence[Chart]
    title: str = ""
    question: str = ""


def charts_page(
    sections: Sequence[Section], title: str, *, about: str = "", top: str = "", note: str = NOTE
) -> str:
    """The page. `about` and `note` are texts, `top` is HTML; sections without a chart are left out.

    All charts go from 0 to the last step of any.
    """
    lines = (line for each in sections for chart in each.charts for line in chart.panel.series)
    span = (0.0, max([1.0, *(step for line in lines for step in line.steps)]))
    parts, data = list[str](), list[object]()
    for section in sections:
        if not section.charts:
            continue
        figures = []
        for chart in section.charts:
            figures.append(_figure(replace(chart, number=len(data), span=span)))
            data.append(_values(chart.panel))
        if section.title:
            parts.append(f"<h2>{escaped(section.title)}</h2>")
            parts.append(f"<p class='q'>{escaped(section.question)}</p>")
        parts.append(f"<div class='charts'>{''.join(figures)}</div>")
    script = (Path(__file__).parent / "charts_page.js").read_text("utf-8")
    values = json.dumps(plain({"span": span, "charts": data})).replace("<", "\\u003c")
    return html_page(
        title,
        f"{STYLE}{_STYLE}",
        f"<h1>{escaped(title)}</h1><p class='q'>{escaped(about)}</p>"
        f"{top}{''.join(parts)}"
        f"<p class='q'>{escaped(note)}</p>"
        f'<script type="application/json" id="data">{values}</script><script>{script}</script>',
        allowed="; script-src 'unsafe-inline'",
        head='<meta name="viewport" content="width=device-width">'
        '<meta name="color-scheme" content="light dark">',
    )


_STYLE = """
body{font:15px/1.5 system-ui,'DejaVu Sans',sans-serif;margin:1.2em auto;max-width:1240px;
padding:0 1em;color:var(--ink);background:var(--ground)}h1{font-size:1.4em;margin:.2em 0}
h2{font-size:1.15em;margin:1.6em 0 0}.q{color:var(--soft);margin:0 0 .5em}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,520px),1fr));gap:14px}
figure{margin:0;border:1px solid var(--grid);border-radius:6px;padding:10px 12px 4px;
position:relative}figcaption{font-weight:600}svg{display:block;width:100%;height:auto}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;color:var(--soft);font-size:13px;min-height:1.5em}
.legend b{display:inline-block;width:16px;height:3px;vertical-align:middle;margin-right:5px}
.legend i{font-style:normal;color:var(--ink);font-variant-numeric:tabular-nums}
.alarms{border-left:4px solid var(--alarm);padding:.4em 1em;margin:1em 0;list-style:none}
.alarms li{margin:.3em 0}.alarms span{background:var(--alarm);color:var(--ground);font-weight:700;
border-radius:10px;padding:0 7px;margin-right:6px;font-size:13px}
.none{border-left:4px solid var(--green);padding:.4em 1em;margin:1em 0}
.cursor{stroke:var(--soft);visibility:hidden}
#step{position:fixed;right:14px;top:10px;background:var(--ink);color:var(--ground);padding:2px 10px;
border-radius:10px;font-size:13px}#step:empty{display:none}
"""


def _figure(chart: Chart) -> str:
    """A chart under its title, with a legend that shows the values at the pointer."""
    entries = "".join(
        f"<span><b style='background:{colour_of(series, index)}'></b>{escaped(series.label)} "
        f"<i>{number_text(series.values[-1])}</i></span>"
        for index, series in enumerate(chart.panel.series)
    )
    caption = f"<figcaption>{escaped(chart.panel.title)}</figcaption>"
    return f"<figure>{caption}<div class='legend'>{entries}</div>{chart_svg(chart)}</figure>"


def _values(panel: Panel) -> list[dict[str, list[float]]]:
    """What the pointer shows of a chart: steps and values of each line."""
    found = []
    for series in panel.series:
        steps, values = thinned(series.steps, series.values)
        found.append({"steps": steps, "values": [_rounded(value) for value in values]})
    return found


def _rounded(value: float) -> float:
    """Four significant digits: what is shown."""
    return float(f"{value:.4g}") if math.isfinite(value) else value
