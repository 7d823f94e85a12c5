"""`posttrain forensics`: what a run's rewards paid for."""

from __future__ import annotations

from typing import Annotated

import typer

from posttrain.pipelines.cli.common import (
    DEFAULT_HOME,
    EPILOG_CODES,
    Boundary,
    DebugOption,
    HomeOption,
    JsonOption,
    StoreOption,
    folders,
    stdout_to_stderr,
)
from posttrain.pipelines.cli.reports import OutOption, StageOption, give, open_run

EPILOG = (
    "Examples:\n\n"
    "  posttrain forensics 3f2a9c\n\n"
    "  posttrain forensics 3f2a9c --step 12 --out rewards.html\n\n"
    "  posttrain forensics 3f2a9c --stage rl --json\n\n"
    "docs/comparing.md lists the patterns with their statistics and thresholds.\n\n" + EPILOG_CODES
)


def forensics(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Id that `posttrain run` printed, or its start.")
    ],
    step: Annotated[
        int | None,
        typer.Option("--step", min=1, help="One step, from 1.  [default: all steps kept]"),
    ] = None,
    stage: StageOption = None,
    home: HomeOption = DEFAULT_HOME,
    store: StoreOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show how a run's rewards were distributed over time, and patterns that look like gaming.

    Rewards that grow with length or repetition, form paid without the right answer, responses that
    are all the same, rewards that never vary, failures apart from zeros. Changes nothing.
    """
    home, shared = folders(home, store)
    with Boundary(as_json=as_json, debug=debug):
        with stdout_to_stderr(as_json):
            past = open_run(run, home, shared)
            from posttrain.pipelines.analysis.forensics import forensics_of

            report = forensics_of(past, stage, step)
        give(report, "forensics", home, out, as_json)
