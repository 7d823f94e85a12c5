"""`posttrain replay`: compute a past optimizer step again, and say whether it is the same."""

from __future__ import annotations

from typing import Annotated

import typer

from posttrain.pipelines.cli.common import EPILOG_CODES, CommandContext, Result, command
from posttrain.pipelines.cli.reports import RunArgument, StageOption, open_run

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
    step: Annotated[int, typer.Option(min=1, help="Optimizer step, from 1.")],
    stage: StageOption = None,
) -> Result:
    """Compute a past optimizer step again and compare it, tensor by tensor, with its record.

    Starts from the newest checkpoint before the step, or from what the stage read. The run is not
    changed.
    """
    past = open_run(run, context)
    from posttrain.pipelines.analysis.replay import Replay
    from posttrain.pipelines.run.progress import make_reporter

    with make_reporter(json=context.as_json, plain=True) as reporter:
        result = Replay(past, reporter).step(step, stage)
    first = result.first_difference
    verdict = "equal" if first is None else f"not equal. First: {first}"
    context.say(f"step {result.step} of stage {result.stage}: {verdict}")
    return Result(result.values(), exit_code=0 if first is None else 1)
