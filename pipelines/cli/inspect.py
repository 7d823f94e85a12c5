"""`posttrain inspect`: a past RL step token by token, as a page and as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.core.errors import ConfigError
from posttrain.pipelines.cli.common import (
    EPILOG_CODES,
    CommandContext,
    Result,
    RunArgument,
    command,
)
from posttrain.pipelines.cli.reports import open_run

if TYPE_CHECKING:
    from rich.console import Console

    from posttrain.core.microscope.what_if import WhatIf
    from posttrain.pipelines.evidence import EvidenceFolder
    from posttrain.pipelines.microscope import PastStage

EPILOG = (
    "Examples:\n\n"
    "  posttrain inspect 3f2a9c\n\n"
    "  posttrain inspect 3f2a9c --step 12\n\n"
    "  posttrain inspect 3f2a9c --step 12 --what-if own@token-mean\n\n"
    "  posttrain inspect 3f2a9c --step 12 --what-if ppo_clip,clip_high=0.28 --what-if "
    "gspo@seq-mean-token-mean\n\n"
    "The weight of a token is d loss / d logprob: below 0 it is made likelier. A what-if is "
    "LOSS[,field=value]...[@AGGREGATOR[,field=value]...], `own` the run's loss; `posttrain plugins "
    "list --kind policy_loss` has the names, and `posttrain plugins show ppo_clip` the fields. The "
    "page needs no network. keep.evidence_mb says how many steps a run keeps.\n\n" + EPILOG_CODES
)
SHOWN_SAMPLES, SHOWN_TOKENS, TEXT = 16, 10, 36
HIDDEN = {"reward_status", "reward_detail", "policy_version"}
"""Of a sample's row: on the page and in the JSON, not in the table."""


@command(store=True)
def inspect(
    context: CommandContext,
    run: RunArgument,
    step: Annotated[
        int | None, typer.Option("--step", min=1, help="Step to look at; without it, a list.")
    ] = None,
    stage: Annotated[
        str | None,
        typer.Option("--stage", help="Stage of kind rl; needed where there are several."),
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if", metavar="LOSS[@AGGREGATOR]", help="Another loss to compare with."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The page.  \\[default: HOME/reports/...]", show_default=False),
    ] = None,
) -> Result:
    """Show what each token of a past RL step got from its loss, and would get from another.

    Writes one HTML page, prints the step's samples and its tokens of largest weight.
    """
    from posttrain.core.microscope.what_if import parse

    if step is None and (what_if or out is not None):
        raise ConfigError("--what-if and --out are about one step: name it with --step")
    asked = [parse(text) for text in what_if or ()]
    console = context.console()
    from posttrain.pipelines.microscope import PastStage

    opened = open_run(run, context)
    found = opened.evidence(stage)
    past = PastStage(opened.resolved.config, found.stage, opened.manager)
    run_id = opened.record.run_id
    if step is None:
        told = _list_steps(found, console)
    else:
        name = f"{run_id[:8]}-{found.stage}-step-{step:06d}.html"
        title = f"run {run_id[:8]} · stage {found.stage} · step {step}"
        place = out or context.home / "reports" / name
        told = _one_step(past, found, step, asked, title, place, console)
    return Result({"run_id": run_id, "stage": found.stage, **told})


def _list_steps(found: EvidenceFolder, console: Console) -> dict[str, object]:
    from posttrain.pipelines.microscope import steps_with_figures

    steps = steps_with_figures(found.folder)
    rows: list[dict[str, object]] = [{"step": step, **figures} for step, figures in steps.items()]
    _print_table(f"Steps of stage {found.stage} that have evidence", rows, console)
    console.print("look at one with --step", markup=False)
    return {"steps": rows}


def _one_step(
    past: PastStage,
    found: EvidenceFolder,
    step: int,
    asked: Sequence[WhatIf],
    title: str,
    place: Path,
    console: Console,
) -> dict[str, object]:
    from posttrain.core.microscope.page import page
    from posttrain.core.microscope.report import OWN_NAME
    from posttrain.core.microscope.table import samples, top_tokens
    from posttrain.core.reports.page import write_html
    from posttrain.pipelines.comparing.past_run import check_step, read_unchanged
    from posttrain.pipelines.microscope import report_of

    check_step(found, step)
    evidence = read_unchanged(found, step)
    report = report_of(past, evidence, title, asked)
    path = place.expanduser().resolve()
    write_html(path, page(report))
    own = report.weights[OWN_NAME]
    rows = samples(evidence, own, SHOWN_SAMPLES)
    tokens = top_tokens(evidence, own, SHOWN_TOKENS)
    variants = [
        {name: sum(values) if isinstance(values, list) else values for name, values in row.items()}
        for row in report.meta["variants"]
    ]
    shown = [{k: v for k, v in row.items() if k not in HIDDEN} for row in rows]
    more = len(evidence.batch) - len(rows)
    heading = f"{title}: samples" + (f" ({more} more on the page)" if more else "")
    _print_table(heading, shown, console)
    quoted = [row | {"text": json.dumps(row["text"], ensure_ascii=False)} for row in tokens]
    _print_table("Tokens of largest |weight|", quoted, console)
    _print_table("The loss, and others on the same tokens", variants, console)
    for note in report.meta["notes"]:
        console.print(f"note: {note}", markup=False)
    console.print(f"page: {path}", markup=False)
    told: dict[str, object] = {"step": step, "page": str(path), "notes": report.meta["notes"]}
    return told | {"samples": rows, "top_tokens": tokens, "variants": variants}


def _print_table(title: str, rows: Sequence[Mapping[str, object]], console: Console) -> None:
    """Rows as a table; columns that are empty throughout are left out."""
    from rich.table import Table
    from rich.text import Text

    names = [n for n in (rows[0] if rows else ()) if any(row[n] is not None for row in rows)]
    table = Table(title=Text(title), title_justify="left")
    for name in names:
        numbers = all(isinstance(row[name], int | float | None) for row in rows)
        table.add_column(name, justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(row[name])) for name in names))
    console.print(table)


def _cell(value: object) -> str:
    """A value for people: four digits, texts cut and on one line."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if value is None:
        return ""
    if not isinstance(value, str):
        return str(value)
    line = value.encode("unicode_escape").decode("ascii") if not value.isprintable() else value
    return line if len(line) <= TEXT else line[: TEXT - 1] + "…"
