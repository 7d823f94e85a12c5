"""A report as one HTML file: its script, its style and its numbers are in it, nothing is loaded."""

from __future__ import annotations

import html
import json
from importlib.resources import files

from posttrain.core.microscope.report import Report


def page(report: Report) -> str:
    """The page. What people or models wrote stands in it as JSON alone, with no `<` in it."""
    parts = files("posttrain.core.microscope")
    script, style = (parts.joinpath(name).read_text("utf-8") for name in ("page.js", "page.css"))
    title = html.escape(str(report.meta["title"]))
    columns = "\n".join(
        f'<script type="text/plain" id="column-{name}">{text}</script>'
        for name, text in report.columns.items()
    )
    selects = " ".join(
        f'<label>{label} <select id="{name}"></select></label>'
        for name, label in (
            ("colour", "Colour"),
            ("what", "What if"),
            ("sort", "Order"),
            ("show", "Show"),
        )
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>{style}</style></head><body>
<header><h1>{title}</h1>{selects}
<div class="legend" id="legend"></div><div id="totals"></div><div id="message"></div></header>
<noscript><p>This page draws its tokens with a script of its own; nothing is loaded.</p></noscript>
<ul id="notes"></ul><main id="rows"></main><div id="tip" role="tooltip" hidden></div>
<script type="application/json" id="meta">{as_json(report.meta)}</script>
{columns}
<script>
{script}</script></body></html>
"""


def as_json(value: object) -> str:
    """JSON that may stand between script tags: no text in it can end them, or begin a comment."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text
