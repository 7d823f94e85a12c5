"""What the commands that report share: where the page goes, and tables at a terminal."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.pipelines.cli import complete
from posttrain.pipelines.cli.common import CommandContext, Result

if TYPE_CHECKING:
    from posttrain.core.analysis.report import Report
    from posttrain.pipelines.analysis.past_run import PastRun

RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Id that `posttrain run` printed, or its start.",
        autocompletion=complete.runs,
    ),
]
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
    typer.Option(
        "--stage",
        help="Stage of the run; needed where several could be meant.",
        autocompletion=complete.stages,
    ),
]
StepOption = Annotated[
    int | None, typer.Option("--step", min=1, help="One step, from 1.  \\[default: all steps kept]")
]


def open_run(run: str, context: CommandContext) -> PastRun:
    """As of `past_run`, in the home and store of the command."""
    from posttrain.pipelines.analysis import past_run

    return past_run.open_run(run, context.home, context.store)


def open_record(run: str, context: CommandContext) -> PastRun:
    """As of `past_run`, in the home and store of the command."""
    from posttrain.pipelines.analysis import past_run

    return past_run.open_record(run, context.home, context.store)


def give(context: CommandContext, report: Report, what: str, out: Path | None) -> Result:
    """Write the page and show its tables; the result is the report with the page's path."""
    from posttrain.core.analysis.report import write_page

    page = write_page(report_path(context.home, what, out), report.html())
    report.show(context.console())
    context.say(f"page: {page}")
    return result_of(report, page=str(page))


def result_of(report: Report, exit_code: int = 0, **more: object) -> Result:
    """The report's JSON object."""
    from posttrain.core.analysis.report import plain

    values = {name: plain(value) for name, value in {**report.values, **more}.items()}
    return Result(values, exit_code)


def report_path(home: Path, what: str, out: Path | None) -> Path:
    """The file asked for, or a new one in the home's reports."""
    if out is not None:
        return out.expanduser().resolve()
    stem = f"{what}-{datetime.now():%Y%m%d-%H%M%S}"
    names = [f"{stem}.html", *(f"{stem}-{number}.html" for number in range(2, 100))]
    return next(p for p in (home / "reports" / name for name in names) if not p.exists())
