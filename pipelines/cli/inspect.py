"""`posttrain inspect`: a past step token by token, as a page and as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from posttrain.core.errors import ConfigError
from posttrain.pipelines.cli import complete
from posttrain.pipelines.cli.common import EPILOG_CODES, CommandContext, Result, command
from posttrain.pipelines.cli.reports import RunArgument, give, open_run, result_of

EPILOG = (
    "Examples:\n\n"
    "  posttrain inspect 3f2a9c\n\n"
    "  posttrain inspect 3f2a9c --step 12\n\n"
    "  posttrain inspect 3f2a9c --step 12 --what-if own@token-mean\n\n"
    "  posttrain inspect 3f2a9c --step 12 --what-if ppo_clip,clip_high=0.28 --what-if "
    "gspo@seq-mean-token-mean\n\n"
    "  posttrain inspect 3f2a9c --stage dpo --step 12 --what-if simpo,beta=2\n\n"
    "The weight of a token is d loss / d logprob: below 0 it is made likelier. A what-if is "
    "LOSS[,field=value]...[@AGGREGATOR[,field=value]...], `own` the run's loss; `posttrain plugins "
    "list --kind policy_loss` has the names, and `posttrain plugins show ppo_clip` the fields. Of "
    "a stage on preferences it is one of `--kind preference_loss`, of sft a weighting. The page "
    "needs no network. keep.evidence_mb says how many steps a run keeps.\n\n" + EPILOG_CODES
)


@command(store=True)
def inspect(
    context: CommandContext,
    run: RunArgument,
    step: Annotated[
        int | None, typer.Option(min=1, help="Step to look at; without it, a list.")
    ] = None,
    stage: Annotated[
        str | None,
        typer.Option(
            help="Stage that trains; left out, the only one of kind rl or distill.",
            autocompletion=complete.stages,
        ),
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(metavar="LOSS[@AGGREGATOR]", help="Another loss to compare with."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The page.  \\[default: HOME/reports/...]")
    ] = None,
) -> Result:
    """Show what each token of a past step got from its loss, and would get from another.

    Writes one HTML page, prints the step's samples and its tokens of largest weight.
    """
    from posttrain.core.analysis.what_if import parse

    if step is None and (what_if or out is not None):
        raise ConfigError("--what-if and --out are about one step: name it with --step")
    asked = [parse(text) for text in what_if or ()]
    past = open_run(run, context)
    from posttrain.pipelines.analysis.inspection import inspect_step, list_steps

    if step is not None:
        report = inspect_step(past, stage, step, asked)
        return give(context, report, f"inspect-step-{step}", out)
    report = list_steps(past, stage)
    report.show(context.console())
    return result_of(report)
