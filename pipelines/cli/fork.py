"""`posttrain fork`: a new run that shares the first steps of another and goes on from there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.core.errors import ConfigError
from posttrain.pipelines.cli import complete
from posttrain.pipelines.cli.common import (
    EPILOG_CODES,
    CommandContext,
    PlainOption,
    Result,
    SetOption,
    command,
)
from posttrain.pipelines.cli.reports import OutOption, give

if TYPE_CHECKING:
    from posttrain.pipelines.api.fork import Fork

EPILOG = (
    "Examples:\n\n"
    "  posttrain fork 3f2a9c --step 40 --set stages.rl.policy_loss=gspo\n\n"
    "  posttrain fork 3f2a9c --step 40 --set stages.rl.steps=80 --dry-run\n\n"
    "  posttrain fork 3f2a9c --step 40 --seeds 3      (three runs that sample otherwise)\n\n"
    "  posttrain fork 3f2a9c --stage rl --set stages.rl.steps=80      (all of rl again)\n\n"
    "  posttrain fork --tree\n\n"
    "The run that is forked needs a checkpoint at the step, or before it: its config says "
    "keep.every: 10, or checkpoint_every while the stage runs. The same command after an "
    "interruption continues.\n\n" + EPILOG_CODES
)


@command(store=True, interrupted="interrupted; the same command continues the fork")
def fork(
    context: CommandContext,
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="Id that `posttrain run` printed, or its start.",
            autocompletion=complete.runs,
        ),
    ] = None,
    step: Annotated[int | None, typer.Option(min=1, help="Last step that is shared.")] = None,
    stage: Annotated[
        str | None,
        typer.Option(
            help="Stage that is forked; without --step, the fork is before its first step.",
            autocompletion=complete.stages,
        ),
    ] = None,
    overrides: SetOption = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1, max=1000, help="So many forks, each with draws of its own after the step."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be computed, and stop.")
    ] = False,
    tree: Annotated[
        bool, typer.Option("--tree", help="Draw which runs of the home were forked from which.")
    ] = False,
    out: OutOption = None,
    plain: PlainOption = False,
) -> Result:
    """Start a run that shares the first steps of another one and goes on under changed settings.

    What is shared is not computed again: stages before the fork, and the steps up to --step. An
    unchanged fork ends in the same weights, bit for bit.
    """
    if tree:
        from posttrain.pipelines.analysis.fork_tree import tree_report

        return give(context, tree_report(context.home, context.store, run), "forks", out)
    if run is None:
        raise ConfigError(
            "name the run to fork, as `posttrain run` printed its id (posttrain fork RUN --step N),"
            " or ask for --tree"
        )
    from posttrain.pipelines.api.fork import make_fork

    numbers = [None] if seeds is None else list(range(1, seeds + 1))
    forks = [
        make_fork(run, context.home, step=step, stage=stage, overrides=overrides or (), seed=seed)
        for seed in numbers
    ]
    for note in forks[0].notes:
        context.say(f"note: {note}")
    if dry_run:
        return _planned(forks, context)
    return _run(forks, context, plain=plain)


def _planned(forks: list[Fork], context: CommandContext) -> Result:
    """What each fork would compute."""
    from posttrain.pipelines.api.planned import planned
    from posttrain.pipelines.cli.plan import print_estimates, print_stages
    from posttrain.pipelines.run.checks import resolve_configs

    found = []
    for made in forks:
        resolved, manager = resolve_configs([made.config], made.overrides)
        plan = planned(resolved, manager, context.home, context.store)
        console = context.console()
        if made.seed is not None:
            context.say(f"seed {made.seed}:")
        print_stages(plan.stages, console, why=False)
        if plan.estimates:
            print_estimates(plan, console)
        found.append({**made.to_json(), "plan": plan.to_json()})
    return Result({"status": "planned", "forks": found})


def _run(forks: list[Fork], context: CommandContext, *, plain: bool) -> Result:
    """Run one fork after another; all stages before the fork are done by then."""
    from posttrain.pipelines.api.calls import run_configs
    from posttrain.pipelines.cli.run import shown
    from posttrain.pipelines.run.prefect_server import OwnServer
    from posttrain.pipelines.run.summary import print_summary, to_json

    done = []
    for made in forks:
        server = OwnServer(context.home)
        if made.seed is not None:
            context.say(f"\nfork with seed {made.seed}")
        result, _, _ = run_configs(
            [made.config],
            made.overrides,
            context.home,
            context.store,
            lambda: shown(as_json=context.as_json, plain=plain),
            server,
        )
        print_summary(result, context.console())
        done.append((made, result))
        if result.status != "completed":
            break
    rows = [{**to_json(result), "forked_from": made.to_json()} for made, result in done]
    status = done[-1][1].status
    if not context.as_json and status == "completed":
        ids = " ".join(result.run_id[:12] for _, result in done)
        given = " ".join(context.options())
        print("\nnext:")
        print(f"  posttrain compare {done[0][0].run[:12]} {ids} {given}".rstrip())
        print(f"  posttrain fork --tree {given}".rstrip())
    values = rows[0] if len(forks) == 1 else {"status": status, "runs": rows}
    return Result(values, exit_code=0 if status == "completed" else 1)
