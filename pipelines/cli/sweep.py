"""`posttrain sweep`: run the variants of a config, and compare them in one table."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.core.errors import ConfigError
from posttrain.pipelines.cli.common import (
    EPILOG_CODES,
    CommandContext,
    ConfigsArgument,
    PlainOption,
    Result,
    SetOption,
    command,
)
from posttrain.pipelines.cli.deployments import JobVariables, parse_variables
from posttrain.pipelines.cli.reports import result_of
from posttrain.pipelines.deploy.placing import placed

if TYPE_CHECKING:
    from posttrain.core.runtime.reporter import Reporter
    from posttrain.pipelines.sweep.branches import Sweep

EPILOG = (
    "Examples:\n\n"
    "  posttrain sweep my.yaml --dry-run\n\n"
    "  posttrain sweep my.yaml --seeds 0,1,2 --parallel 2\n\n"
    "  posttrain sweep my.yaml --only 'clip-higher' --stop-early\n\n"
    "  posttrain sweep my.yaml --work-pool posttrain --home /data/runs\n\n"
    "  posttrain sweep my.yaml --ray 10.0.0.1:6379 --home /data/runs\n\n"
    "The config has a section `variants` (docs/sweeps.md). Stages that variants share run once. A "
    "variant that fails is in the table with its reason, the others go on, and the exit code is 1. "
    "The same command after an interruption goes on where it was.\n\n" + EPILOG_CODES
)


@command(store=True, interrupted="interrupted; the same command goes on where it was")
def sweep(
    context: CommandContext,
    configs: ConfigsArgument,
    overrides: SetOption = None,
    parallel: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Branches that run at once.  \\[default: 1 on this machine, elsewhere as many as "
            "there is room for]",
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="A,B", help="Seeds in the place of those of the config.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="This variant, and the base; may be repeated."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check all variants and say what would run.")
    ] = False,
    stop_early: Annotated[
        bool,
        typer.Option(
            "--stop-early",
            help="Stop a variant at an evaluation during training that shows it behind the base.",
        ),
    ] = False,
    work_pool: Annotated[
        str | None,
        typer.Option(
            metavar="POOL",
            help="Run the branches in this Prefect work pool (PREFECT_API_URL names the server).",
        ),
    ] = None,
    job_variables: JobVariables = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Run the branches on the nodes of this Ray cluster: HOST:PORT, env "
            "(POSTTRAIN_RAY_ADDRESS), or config (cluster.ray.address).",
        ),
    ] = None,
    plain: PlainOption = False,
) -> Result:
    """Run the variants of a config as branches of one DAG, and compare them with the base."""
    from posttrain.pipelines.sweep.sweeping import SweepOptions, planned_sweep, run_sweep

    options = SweepOptions(
        *(context.home, context.store, parallel, parse_seeds(seeds), tuple(only or ())),
        *(stop_early, placed(context.home, work_pool, parse_variables(job_variables or []), ray)),
    )
    if dry_run:
        found = planned_sweep(configs, overrides, options)
        for line in described(found):
            context.say(line)
        return Result(as_json(found))

    def shown() -> AbstractContextManager[Reporter]:
        from posttrain.pipelines.run.progress import make_reporter

        return make_reporter(json=context.as_json, plain=plain)

    swept = run_sweep(configs, overrides, options, shown)
    swept.report.show(context.console())
    context.say(f"page: {swept.page}")
    return result_of(
        swept.report,
        exit_code=1 if swept.failed else 0,
        page=str(swept.page),
        status="failed" if swept.failed else "completed",
        failed=swept.failed,
        mlflow_run_id=swept.mlflow_run_id,
    )


def parse_seeds(text: str | None) -> tuple[int, ...] | None:
    """`0,1,2` as numbers."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) < 2**63 for part in parts):
        raise ConfigError(f"--seeds {text[:100]!r}: expected whole numbers from 0, such as 0,1,2")
    return tuple(map(int, parts))


def described(found: Sweep) -> list[str]:
    """What would run, in sentences."""
    stages = sum(len(branch.stages) for branch in found.branches)
    stage, metric = found.measure
    names = [f"  {name}{' (base)' * (name == found.base)}" for name in found.settings]
    lines = [
        f"sweep {found.name}: {len(found.settings)} variants x {len(found.seeds)} seed(s) = "
        f"{len(found.branches)} runs, measured by {metric} of '{stage}'",
        *names,
        f"{found.distinct()} different stages, where {stages} would run without sharing",
    ]
    for known, count in found.shared().items():
        name = known.partition(" ")[0]
        seed = next(b.seed for b in found.branches if known in b.stages.values())
        lines.append(f"  {name} with seed {seed}: once for {count} runs")
    if found.section.search is not None:
        lines.append(f"and {found.section.search.trials} trials of a search, each with every seed")
    return lines


def as_json(found: Sweep) -> dict[str, object]:
    """The same as one object."""
    return {
        "status": "ok",
        "name": found.name,
        "base": found.base,
        "measure": {"stage": found.measure[0], "metric": found.measure[1]},
        "seeds": list(found.seeds),
        "variants": {name: dict(values) for name, values in found.settings.items()},
        "runs": len(found.branches),
        "stages": sum(len(branch.stages) for branch in found.branches),
        "different_stages": found.distinct(),
        "trials": found.section.search.trials if found.section.search else 0,
    }
