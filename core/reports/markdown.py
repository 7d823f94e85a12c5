"""A report as Markdown: its tables; pictures are in the page beside it."""

from __future__ import annotations

from posttrain.core.reports.report import Cell, Report, Table, shown


def render(report: Report) -> str:
    """The whole report; nothing that a model wrote can become Markdown's own marks."""
    parts = [f"# {_text(report.title)}", *(f"> {_text(note)}" for note in report.notes)]
    parts += [_table(table) for table in report.tables()]
    return "\n\n".join(parts) + "\n"


def _table(table: Table) -> str:
    lines = [f"## {_text(table.title)}", ""]
    if table.note:
        lines += [_text(table.note), ""]
    if not table.rows:
        return "\n".join([*lines, "nothing"])
    lines += [_row(table.columns), "|" + "---|" * len(table.columns)]
    return "\n".join([*lines, *(_row(row) for row in table.rows)])


def _row(cells: object) -> str:
    assert isinstance(cells, list | tuple)
    return f"| {' | '.join(_text(cell) for cell in cells)} |"


def _text(value: Cell) -> str:
    text = shown(value)
    for mark in ("\\", "|", "`", "<", "*", "_", "[", "#"):
        text = text.replace(mark, f"\\{mark}")
    return text
