"""`posttrain plan`: what a run would do, what is cached and why not, and what it may cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.pipelines.api.planned import Device
from posttrain.pipelines.cli.common import (
    EPILOG_CODES,
    CommandContext,
    ConfigsArgument,
    Result,
    SetOption,
    command,
)
from posttrain.pipelines.cli.sweep import as_json, described
from posttrain.pipelines.run.checks import resolve_configs

if TYPE_CHECKING:
    from rich.console import Console

    from posttrain.pipelines.api.planned import Plan

EPILOG = (
    "Examples:\n\n"
    "  posttrain plan quickstart\n\n"
    "  posttrain plan my.yaml --device h100\n\n"
    "  posttrain plan my.yaml --set stages.rl.num_generations=16 --why\n\n"
    "Estimates are rough: expect time within a factor of 2 and memory within 30 %. They count "
    "every row as computed and every response as long as the limit, or as the worked answers after "
    "an sft stage. They leave out the start of the run, reward programs and judges, tools, and "
    "groups that are sampled again.\n\n" + EPILOG_CODES
)


@command(store=True)
def plan(
    context: CommandContext,
    configs: ConfigsArgument,
    overrides: SetOption = None,
    calibration: Annotated[
        bool,
        typer.Option(
            "--calibration/--no-calibration",
            help="Estimate time, memory and disk; this measures the machine for up to 5 s.",
        ),
    ] = True,
    device: Annotated[
        Device | None,
        typer.Option(
            "--device",
            help="Estimate for this device from its peak rates, and measure nothing.",
            show_default="this machine",
        ),
    ] = None,
    why: Annotated[
        bool, typer.Option("--why", help="Print everything that differs from earlier results.")
    ] = False,
) -> Result:
    """Show the DAG, what is cached and why not, the batch arithmetic, and estimates of the cost."""
    resolved, manager = resolve_configs(configs, overrides)
    from posttrain.pipelines.api.planned import planned
    from posttrain.pipelines.sweep.branches import checked_variants

    made = planned(
        resolved, manager, context.home, context.store, device=device, estimates=calibration
    )
    console = context.console()
    if made.round:
        console.print(made.round, markup=False)
    print_stages(made.stages, console, why=why)
    if made.estimates:
        print_estimates(made, console)
    if made.cluster:
        console.print(made.cluster, markup=False)
    if made.store:
        console.print(made.store, markup=False)
    variants = checked_variants(resolved, configs, overrides, context.home)
    if variants is None:
        return Result(made.to_json())
    for line in described(variants):
        console.print(line, markup=False)
    return Result({**made.to_json(), "sweep": as_json(variants)})


def print_stages(rows: Sequence[Mapping[str, Any]], console: Console, *, why: bool = False) -> None:
    """Print the DAG table, the arithmetic, and with `why` everything that differs."""
    from rich.markup import escape
    from rich.table import Table

    from posttrain.core.store.identity import Change

    table = Table(title="Stages, in order", title_justify="left")
    for heading in ("stage", "kind", "reads", "makes", "cached"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        inputs = "\n".join(f"{role}: {source}" for role, source in row["reads"].items())
        cached = "yes" if row["cached"] else f"no: {row['reason']}"
        cells = (row["stage"], row["kind"], inputs, row["makes"], cached)
        table.add_row(*(escape(str(cell)) for cell in cells))
    console.print(table, soft_wrap=False)
    for row in rows:
        if row["arithmetic"]:
            console.print(f"{row['stage']}: {row['arithmetic']}", markup=False)
    for row in rows if why else ():
        if row["changes"]:
            console.print(f"\n{row['stage']} runs because of:", markup=False)
        for change in row["changes"]:
            console.print(f"  {Change(**change)}", markup=False)


def print_estimates(plan: Plan, console: Console) -> None:
    """Print the estimates, and what they are based on."""
    from rich.table import Table

    from posttrain.pipelines.run.progress import duration

    found = plan.estimates
    console.print(f"\nmodel {found['model']}", markup=False)
    if "total" not in found:
        return
    stages = {row["stage"]: row for row in plan.stages if "seconds" in row}
    table = Table(title="Estimates", title_justify="left")
    for heading in ("stage", "a step", "in all", "memory at the peak", "disk"):
        table.add_column(heading, justify="left" if heading == "stage" else "right")
    for name, row in [*stages.items(), ("all", found["total"])]:
        step = f"{row['step_s']:.3g} s" if row.get("steps") else ""
        left, most = row["disk_gb"], row["disk_peak_gb"]
        disk = f"{left:.2f} GB" + (f" (at most {most:.2f})" if most > left else "")
        memory = f"{row['memory_gb']:.2f} GB"
        style = "bold" if name == "all" else None
        table.add_row(name, step, duration(row["seconds"]), memory, disk, style=style)
    console.print(table, soft_wrap=False)
    for line in found["notes"]:
        console.print(line, markup=False)
