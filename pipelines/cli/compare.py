"""`posttrain compare`: algorithms on one step of a run, or whole runs with one another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.core.errors import ConfigError
from posttrain.pipelines.cli import complete
from posttrain.pipelines.cli.common import EPILOG_CODES, CommandContext, Result, command
from posttrain.pipelines.cli.reports import OutOption, StageOption, give, open_record, open_run

if TYPE_CHECKING:
    from posttrain.pipelines.analysis.variants import Wanted

EPILOG = (
    "Examples:\n\n"
    "  posttrain compare 3f2a9c --step 12 --algorithm grpo --algorithm gspo\n\n"
    "  posttrain compare 3f2a9c --step 12 --clip 0.1:0.1 --clip 0.2:0.28 --model\n\n"
    "  posttrain compare 3f2a9c --step 1 --loss cispo --aggregation token-mean --out step.html\n\n"
    "  posttrain compare 3f2a9c --frozen --pool 8 --aggregation token-mean --advantage rloo\n\n"
    "  posttrain compare 3f2a9c 77b0e1 9ad204 --json\n\n"
    "With --step, each variant is computed on what that step sampled, next to the run's own loss; "
    "with --frozen, variants are ranked by bias and variance of their gradients on recorded steps; "
    "without it, runs are laid side by side and those that differ only in the seed are one group. "
    "docs/comparing.md says what each number is.\n\n" + EPILOG_CODES
)


@command(store=True, reads_mlflow=True)
def compare(
    context: CommandContext,
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="Ids that `posttrain run` printed, or their starts.",
            autocompletion=complete.runs,
        ),
    ],
    step: Annotated[
        int | None, typer.Option(min=1, help="Compare algorithms on this step, from 1.")
    ] = None,
    algorithm: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A preset; give it several times.")
    ] = None,
    loss: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[,field=value]", help="The run's own, with this policy loss."),
    ] = None,
    aggregation: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[,field=value]", help="The same, with this aggregator."),
    ] = None,
    clip: Annotated[
        list[str] | None,
        typer.Option(metavar="LOW:HIGH", help="The same, with these bounds of the clip."),
    ] = None,
    advantage: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[,field=value]", help="The same, with this estimator."),
    ] = None,
    no_kl: Annotated[
        bool, typer.Option("--no-kl", help="Leave KL terms out, also of the run's own loss.")
    ] = False,
    model: Annotated[
        bool,
        typer.Option("--model", help="Gradients of the model's parameters too; takes a model."),
    ] = False,
    frozen: Annotated[
        bool,
        typer.Option(
            "--frozen",
            help="Rank variants by bias and variance of their gradients, and predict which learns "
            "faster; takes a model. Without variants, all aggregators.",
        ),
    ] = False,
    pool: Annotated[
        int | None,
        typer.Option(min=1, help="Of --frozen: recorded steps, from --step on.  \\[default: 8]"),
    ] = None,
    batches: Annotated[
        int | None,
        typer.Option(min=8, help="Of --frozen: batches drawn from the pool.  \\[default: 64]"),
    ] = None,
    directions: Annotated[
        int | None,
        typer.Option(min=8, help="Of --frozen: random directions of gradients.  \\[default: 128]"),
    ] = None,
    stage: StageOption = None,
    out: OutOption = None,
) -> Result:
    """Compare algorithms on the frozen rollouts of one step, or whole runs with one another.

    Nothing is sampled or trained, and nothing of the runs is changed. A page with the same tables
    and their pictures goes to HOME/reports.
    """
    from posttrain.core.config.spec import parse_spec
    from posttrain.pipelines.analysis.variants import Wanted, parse_clip

    wanted = Wanted(
        [parse_spec("--algorithm", text) for text in algorithm or ()],
        [parse_spec("--loss", text) for text in loss or ()],
        [parse_spec("--aggregation", text) for text in aggregation or ()],
        [parse_clip(text) for text in clip or ()],
        without_kl=no_kl,
        advantages=[parse_spec("--advantage", text) for text in advantage or ()],
    )
    _check(runs, step, wanted, model, frozen)
    if not frozen and (pool or batches or directions):
        raise ConfigError("--pool, --batches and --directions are of --frozen: add it")
    if frozen:
        from posttrain.core.models.quiet import quiet_libraries
        from posttrain.pipelines.analysis.frozen_ranking import Ranking, rank_frozen

        quiet_libraries()
        how = Ranking(step, pool or 8, batches or 64, directions or 128)
        report = rank_frozen(open_run(runs[0], context), stage, wanted, how)
    elif step is None:
        from posttrain.pipelines.analysis.runs import compare_runs

        report = compare_runs([open_record(run, context) for run in runs], stage)
    else:
        from posttrain.core.models.quiet import quiet_libraries
        from posttrain.pipelines.analysis.algorithms import compare_algorithms

        quiet_libraries()
        report = compare_algorithms(
            open_run(runs[0], context), stage, step, wanted, with_model=model
        )
    return give(context, report, "compare", out)


def _check(runs: list[str], step: int | None, wanted: Wanted, model: bool, frozen: bool) -> None:
    """Raise `ConfigError` where options and number of runs do not fit."""
    if (step is not None or frozen) and len(runs) != 1:
        what = "--frozen ranks variants" if frozen else "--step compares algorithms"
        raise ConfigError(
            f"{what} on the rollouts of one run, and {len(runs)} were given; "
            "give one, or leave the option out to compare the runs"
        )
    if frozen and model:
        raise ConfigError("--frozen computes gradients of the model anyway; leave --model out")
    if step is None and not frozen and (wanted.any or wanted.without_kl or model):
        raise ConfigError(
            "--algorithm, --advantage, --loss, --aggregation, --clip, --no-kl and --model are "
            "about one step of one run: add --step N, or --frozen"
        )
    if step is None and not frozen and len(runs) < 2:
        raise ConfigError(
            "one run was given: name a second to compare it with, or add --step N and two or more "
            "of --algorithm, --advantage, --loss, --aggregation and --clip, or --frozen"
        )
