"""`posttrain replay`: compute a past optimizer step again, and say whether it is the same."""

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
    print_json,
    stdout_to_stderr,
    text_console,
)
from posttrain.pipelines.cli.reports import open_run

EPILOG = (
    "Examples:\n\n"
    "  posttrain replay 3f2a9c --step 12\n\n"
    "  posttrain replay 3f2a9c --step 2 --stage sft --json\n\n"
    "The config's section keep says what a run keeps for this. Exit code 1: something differs.\n\n"
    + EPILOG_CODES
)


def replay(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Id that `posttrain run` printed, or its start.")
    ],
    step: Annotated[int, typer.Option("--step", min=1, help="Optimizer step, from 1.")],
    stage: Annotated[
        str | None,
        typer.Option("--stage", help="Stage of the run; needed where several could be meant."),
    ] = None,
    home: HomeOption = DEFAULT_HOME,
    store: StoreOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Compute a past optimizer step again and compare it, tensor by tensor, with its record.

    Starts from the newest checkpoint before the step, or from what the stage read. Changes nothing
    of the run.
    """
    home, shared = folders(home, store)
    with Boundary(as_json=as_json, debug=debug):
        with stdout_to_stderr(as_json):
            past = open_run(run, home, shared)
            from posttrain.pipelines.analysis.replay import Replay
            from posttrain.pipelines.progress import make_reporter

            with make_reporter(json=as_json, plain=True) as reporter:
                result = Replay(past, reporter).step(step, stage)
        first = result.first_difference
        verdict = "equal" if first is None else f"not equal. First: {first}"
        place = f"step {result.step} of stage {result.stage}"
        text_console(as_json).print(f"{place}: {verdict}", markup=False)
        if as_json:
            print_json(result.values())
        if first is not None:
            raise typer.Exit(1)
