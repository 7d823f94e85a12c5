"""`posttrain rescore`: old rollouts under new rewards."""

from __future__ import annotations

from typing import Annotated

import typer

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
    "  posttrain rescore 3f2a9c --reward accuracy --reward length_penalty:0.2\n\n"
    "  posttrain rescore 3f2a9c --step 12 --reward 'format,tags=[think, answer]:0.5'\n\n"
    "All rewards named together are the new reward, summed by their weights (1 unless given), as a "
    "stage would sum them. `posttrain plugins list` shows the rewards, docs/comparing.md what each "
    "number is.\n\n" + EPILOG_CODES
)


@command(store=True)
def rescore(
    context: CommandContext,
    run: RunArgument,
    reward: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[,field=value][:weight]",
            help="A reward with its fields and weight; give it several times.",
        ),
    ] = None,
    step: StepOption = None,
    stage: StageOption = None,
    out: OutOption = None,
) -> Result:
    """Score the responses that a run kept under other rewards, and say what would change.

    Reports the distribution of each reward before and after, and within groups which pairs change
    their order, which advantages change their sign, and which groups gain or lose their gradient.
    Writes nothing into the run.
    """
    from posttrain.core.models.quiet import quiet_libraries
    from posttrain.pipelines.analysis.rescoring import parse_reward
    from posttrain.pipelines.analysis.rescoring import rescore as rescored

    rewards = [parse_reward(text) for text in reward or ()]
    quiet_libraries()
    report = rescored(open_run(run, context), stage, step, rewards)
    return give(context, report, "rescore", out)
