"""Shared by the commands that report: opening a run, where the page goes, tables at a terminal."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.pipelines.cli.common import print_json, text_console

if TYPE_CHECKING:
    from posttrain.core.analysis.report import Report
    from posttrain.pipelines.analysis.past_run import PastRun

OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="File for the HTML page.  [default: a new one in HOME/reports]",
        show_default=False,
    ),
]
StageOption = Annotated[
    str | None,
    typer.Option("--stage", help="Stage of the run; needed where several could be meant."),
]


def open_run(run: str, home: Path, store: Path) -> PastRun:
    """The run whose id begins with `run`, its config resolved."""
    from posttrain.core.run_record import find_run
    from posttrain.pipelines.cli.common import resolve_configs

    found = find_run(home, run)
    resolved, manager = resolve_configs([found.config], None)
    from posttrain.core.artifacts import ArtifactStore
    from posttrain.pipelines.analysis.past_run import PastRun

    return PastRun(found, resolved, manager, home, ArtifactStore(store))


def give(report: Report, what: str, home: Path, out: Path | None, as_json: bool) -> None:
    """Write the page, then show the tables and, last, the JSON object with the page's path."""
    from posttrain.core.analysis.report import write_page

    page = write_page(report_path(home, what, out), report.html())
    console = text_console(as_json)
    report.show(console)
    console.print(f"page: {page}", markup=False)
    if as_json:
        give_json(report, page=str(page))


def give_json(report: Report, **more: object) -> None:
    """The report's JSON object as the last line of standard output."""
    from posttrain.core.analysis.report import plain

    print_json(plain({**report.values, **more}))


def report_path(home: Path, what: str, out: Path | None) -> Path:
    """The file asked for, or a new one in the home's reports."""
    if out is not None:
        return out.expanduser().resolve()
    stem = f"{what}-{datetime.now():%Y%m%d-%H%M%S}"
    names = [f"{stem}.html", *(f"{stem}-{number}.html" for number in range(2, 100))]
    return next(p for p in (home / "reports" / name for name in names) if not p.exists())
