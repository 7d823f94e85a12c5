"""`posttrain replay`: compute a past optimizer step again, and say whether it is the same."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.pipelines.cli.common import (
    EPILOG_CODES,
    CommandContext,
    Result,
    RunArgument,
    command,
)
from posttrain.pipelines.inputs import resolve_configs

if TYPE_CHECKING:
    from posttrain.pipelines.replay.drive import ReplayResult

EPILOG = (
    "Examples:\n\n"
    "  posttrain replay 3f2a9c --step 12\n\n"
    "  posttrain replay 3f2a9c --step 2 --stage sft --json\n\n"
    "The config's section keep says what a run keeps for this. Exit code 1: something differs.\n\n"
    + EPILOG_CODES
)


@command(store=True)
def replay(
    context: CommandContext,
    run: RunArgument,
    step: Annotated[int, typer.Option("--step", min=1, help="Optimizer step, from 1.")],
    stage: Annotated[
        str | None,
        typer.Option("--stage", help="Stage of the run; needed where several could be meant."),
    ] = None,
) -> Result:
    """Compute a past optimizer step again and compare it, tensor by tensor, with its record.

    Starts from the newest checkpoint before the step, or from what the stage read. The run is not
    changed.
    """
    result = _replay(context, run, step, stage)
    first = result.first_difference
    told = "equal" if first is None else f"not equal. First: {first}"
    context.console().print(f"step {result.step} of stage {result.stage}: {told}", markup=False)
    return Result(to_json(result), exit_code=0 if first is None else 1)


def _replay(context: CommandContext, run: str, step: int, stage: str | None) -> ReplayResult:
    from posttrain.core.run_record import find_run

    found = find_run(context.home, run)
    resolved, manager = resolve_configs([found.config], None)
    from posttrain.core.artifacts import ArtifactStore
    from posttrain.pipelines.progress import make_reporter
    from posttrain.pipelines.replay.drive import Replay

    store = ArtifactStore(context.store)
    with make_reporter(json=context.as_json, plain=True) as reporter:
        made = Replay(found, resolved, manager, context.home, store, reporter)
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
