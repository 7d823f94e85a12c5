"""What the commands that report share: where the page goes, and tables at a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.pipelines.cli.common import CommandContext, Result
from posttrain.pipelines.inputs import resolve_configs

if TYPE_CHECKING:
    from rich.console import Console

    from posttrain.core.reports.report import Report
    from posttrain.pipelines.comparing.past_run import PastRun

OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="File for the HTML page.  \\[default: a new one in HOME/reports]",
        show_default=False,
    ),
]
StageOption = Annotated[
    str | None,
    typer.Option("--stage", help="Stage of the run; needed where several could be meant."),
]


def open_run(run: str, context: CommandContext) -> PastRun:
    """The run whose id begins with `run`, its config resolved."""
    from posttrain.core.run_record import find_run

    found = find_run(context.home, run)
    resolved, manager = resolve_configs([found.config], None)
    from posttrain.core.artifacts import ArtifactStore
    from posttrain.pipelines.comparing.past_run import PastRun

    return PastRun(found, resolved, manager, context.home, ArtifactStore(context.store))


def give(
    context: CommandContext,
    report: Report,
    values: dict[str, object],
    what: str,
    out: Path | None,
) -> Result:
    """Write the page and show its tables; the result is `values` with the page's path."""
    from posttrain.core.reports.page import write_page
    from posttrain.core.reports.report import plain

    page = write_page(report_path(context.home, what, out), report)
    console = context.console()
    show(report, console)
    console.print(f"page: {page}", markup=False)
    return Result({name: plain(value) for name, value in values.items()} | {"page": str(page)})


def report_path(home: Path, what: str, out: Path | None) -> Path:
    """The file asked for, or a new one in the home's reports."""
    if out is not None:
        return out.expanduser().resolve()
    stem = f"{what}-{datetime.now():%Y%m%d-%H%M%S}"
    names = [f"{stem}.html", *(f"{stem}-{number}.html" for number in range(2, 100))]
    return next(p for p in (home / "reports" / name for name in names) if not p.exists())


def show(report: Report, console: Console) -> None:
    """Title, notes and tables where people read."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    from posttrain.core.reports.report import shortened, shown

    console.print(Text(shown(report.title), style="bold"))
    for note in report.notes:
        console.print(Text(f"note: {shown(note)}"))
    for table in report.tables():
        console.print()
        console.print(Text(table.title, style="bold"))
        if table.note:
            console.print(Text(table.note, style="dim"))
        made = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
        for name, cells in zip(table.columns, _by_column(table.rows), strict=False):
            number = any(isinstance(c, int | float) and not isinstance(c, bool) for c in cells)
            made.add_column(Text(shown(name)), justify="right" if number else "left")
        for row in table.rows:
            made.add_row(*(Text(shortened(shown(cell), 200)) for cell in row))
        console.print(made if table.rows else Text("nothing"))


def _by_column(rows: Sequence[Sequence[object]]) -> list[list[object]]:
    return [list(column) for column in zip(*rows, strict=True)] if rows else []
