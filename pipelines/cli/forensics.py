"""`posttrain forensics`: what a run's rewards paid for."""

from __future__ import annotations

from posttrain.pipelines.cli.common import EPILOG_CODES, CommandContext, Result, command
from posttrain.pipelines.cli.reports import (
    OutOption,
    RunArgument,
    StageOption,
    StepOption,
    give,
    open_run,
)

EPILOG = (
    "Examples:\n\n"
    "  posttrain forensics 3f2a9c\n\n"
    "  posttrain forensics 3f2a9c --step 12 --out rewards.html\n\n"
    "  posttrain forensics 3f2a9c --stage rl --json\n\n"
    "docs/comparing.md lists the patterns with their statistics and thresholds.\n\n" + EPILOG_CODES
)


@command(store=True, reads_mlflow=True)
def forensics(
    context: CommandContext,
    run: RunArgument,
    step: StepOption = None,
    stage: StageOption = None,
    out: OutOption = None,
) -> Result:
    """Show how a run's rewards were distributed over time, and patterns that look like gaming.

    Rewards that grow with length or repetition, form paid without the right answer, responses that
    are all the same, rewards that never vary, failures apart from zeros. Changes nothing.
    """
    past = open_run(run, context)
    from posttrain.pipelines.analysis.forensics import forensics_of

    return give(context, forensics_of(past, stage, step), "forensics", out)
