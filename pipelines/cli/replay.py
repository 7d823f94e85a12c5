"""`posttrain replay`: compute a past optimizer step again, and say whether it is the same."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    resolve_configs,
    stdout_to_stderr,
    text_console,
)

if TYPE_CHECKING:
    from posttrain.pipelines.replay.drive import ReplayResult

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
            result = _replay(run, step, stage, home, shared, as_json)
        console = text_console(as_json)
        first = result.first_difference
        place = f"step {result.step} of stage {result.stage}"
        if first is None:
            console.print(f"{place}: equal", markup=False)
        else:
            console.print(f"{place}: not equal. First: {first}", markup=False)
        if as_json:
            print_json(to_json(result))
        if first is not None:
            raise typer.Exit(1)


def _replay(
    run: str, step: int, stage: str | None, home: Path, store: Path, as_json: bool
) -> ReplayResult:
    from posttrain.core.run_record import find_run

    found = find_run(home, run)
    resolved, manager = resolve_configs([found.config], None)
    from posttrain.core.artifacts import ArtifactStore
    from posttrain.pipelines.progress import make_reporter
    from posttrain.pipelines.replay.drive import Replay

    with make_reporter(json=as_json, plain=True) as reporter:
        made = Replay(found, resolved, manager, home, ArtifactStore(store), reporter)
        return made.step(step, stage)


def to_json(result: ReplayResult) -> dict[str, object]:
    """The replay as one JSON object."""
    first = result.first_difference
    return {
        "run_id": result.run_id,
        "stage": result.stage,
        "step": result.step,
        "from_step": result.from_step,
        "equal": result.equal,
        "first_difference": None if first is None else asdict(first),
        "notes": result.notes,
        "steps": [asdict(compared) for compared in result.steps],
    }
