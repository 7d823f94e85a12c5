"""A report as one HTML file that loads nothing: its style and pictures are inside it.

All text is escaped: what a model wrote is shown, never obeyed.
"""

from __future__ import annotations

import base64
import html
import os
import uuid
from pathlib import Path

from posttrain.core.errors import ResourceError
from posttrain.core.reports.report import Picture, Report, Table, shown

_STYLE = """
body{font:15px/1.5 system-ui,'DejaVu Sans',sans-serif;max-width:1200px;margin:2em auto;
padding:0 1em;color:#1a1a1a}h1{font-size:1.5em}h2{font-size:1.15em;margin:2em 0 .3em}
table{border-collapse:collapse;font-size:13px;display:block;overflow-x:auto}
th,td{padding:.3em .7em;border-bottom:1px solid #ddd;text-align:left;vertical-align:top;
white-space:pre-wrap;max-width:36em}th{background:#f5f5f5}td.n{text-align:right;white-space:nowrap;
font-variant-numeric:tabular-nums}p.note{color:#555;margin:.2em 0 .6em;font-size:13px}
ul.notes{background:#fff8e1;border-left:4px solid #e0a800;padding:.6em 2em}img{max-width:100%}
"""
# The browser itself refuses whatever a mistake here would let it load or run.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def render(report: Report) -> str:
    """The whole page."""
    title = html.escape(shown(report.title))
    notes = "".join(f"<li>{html.escape(shown(note))}</li>" for note in report.notes)
    parts = [_table(p) if isinstance(p, Table) else _picture(p) for p in report.parts]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1>"
        + (f'<ul class="notes">{notes}</ul>' if notes else "")
        + "".join(parts)
        + "</body></html>\n"
    )


def write_page(path: Path, report: Report) -> Path:
    """Write the page to `path`, whole or not at all; raises `ResourceError`."""
    return write_html(path, render(report))


def write_html(path: Path, text: str) -> Path:
    """Write a page's text to `path`, whole or not at all; raises `ResourceError`."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        if partial.is_file():
            partial.unlink()
        raise ResourceError(
            f"cannot write the page {path}: {error.strerror or error}; name another file with "
            "--out, in a folder that can be written to"
        ) from error
    return path


def _heading(title: str, note: str) -> str:
    told = f'<p class="note">{html.escape(shown(note))}</p>' if note else ""
    return f"<h2>{html.escape(shown(title))}</h2>{told}"


def _table(table: Table) -> str:
    names = "".join(f"<th>{html.escape(shown(name))}</th>" for name in table.columns)
    head = f"<tr>{names}</tr>" if any(table.columns) else ""
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows)
    body = f"{head}{rows}" if table.rows else "<tr><td>nothing</td></tr>"
    return f"{_heading(table.title, table.note)}<table>{body}</table>"


def _cell(value: object) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    text = html.escape(shown(value))  # type: ignore[arg-type]
    return f'<td class="n">{text}</td>' if number else f"<td>{text}</td>"


def _picture(picture: Picture) -> str:
    data = base64.b64encode(picture.png).decode()
    told = html.escape(shown(picture.note or picture.title), quote=True)
    heading = _heading(picture.title, picture.note)
    return f'{heading}<img alt="{told}" src="data:image/png;base64,{data}">'
