"""`posttrain plan`: what a run would do, what is cached and why not, and what it would cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.core.reasons import Change, Reason
from posttrain.pipelines.cli.common import (
    DEFAULT_HOME,
    EPILOG_CODES,
    Boundary,
    ConfigsArgument,
    DebugOption,
    HomeOption,
    JsonOption,
    SetOption,
    StoreOption,
    folders,
    print_json,
    resolve_configs,
    stdout_to_stderr,
    text_console,
)

if TYPE_CHECKING:
    from rich.console import Console

    from posttrain.core.config.schema import RunConfig
    from posttrain.core.plugin_manager import PluginManager
    from posttrain.pipelines.costs import Costs

EPILOG = (
    "Examples:\n\n"
    "  posttrain plan quickstart\n\n"
    "  posttrain plan my.yaml --set stages.rl.num_generations=16 --why\n\n" + EPILOG_CODES
)
CalibrationOption = Annotated[
    bool,
    typer.Option(
        "--calibration/--no-calibration",
        help="Measure this machine for some two seconds, and estimate time, memory and disk.",
    ),
]


def plan(
    configs: ConfigsArgument,
    overrides: SetOption = None,
    home: HomeOption = DEFAULT_HOME,
    store: StoreOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
    calibration: CalibrationOption = True,
    why: Annotated[
        bool, typer.Option("--why", help="Print everything that differs from earlier results.")
    ] = False,
) -> None:
    """Show the DAG, what is cached and why not, the batch arithmetic, and what it will cost."""
    home, shared = folders(home, store)
    with Boundary(as_json=as_json, debug=debug):
        with stdout_to_stderr(as_json):
            resolved, manager = resolve_configs(configs, overrides)
            from posttrain.pipelines.planning import plan_stages
            from posttrain.pipelines.rounds import look

            begun = look(resolved, manager, home)
            resolved = begun.resolved
            plans = plan_stages(resolved, home, manager, shared, begun.rows_digest)
            status = {stage.name: (stage.cached, stage.reason) for stage in plans}
            rows = stage_rows(resolved.config, resolved.order, status)
            todo = [name for name in resolved.order if not status[name][0]]
            costs = _costs(resolved.config, manager, home, todo) if calibration else None
        console = text_console(as_json)
        if begun.nothing_new or begun.told:
            console.print(begun.nothing_new or begun.told, markup=False)
        print_stages(rows, console)
        if why:
            print_reasons(rows, console)
        told: dict[str, object] = {"name": resolved.config.name}
        if costs is not None:
            print_costs(costs, console)
            told |= {"model": costs.model, "notes": list(costs.notes)}
            told |= {"calibration": dict(costs.measured), "total": dict(costs.total)}
            rows = [row | dict(costs.stages.get(str(row["stage"]), {})) for row in rows]
        if as_json:
            print_json(told | {"stages": rows})


def _costs(config: RunConfig, manager: PluginManager, home: Path, todo: Sequence[str]) -> Costs:
    from posttrain.pipelines.costs import estimate_run

    return estimate_run(config, manager, home, todo)


def stage_rows(
    config: RunConfig, order: tuple[str, ...], status: dict[str, tuple[bool, Reason]]
) -> list[dict[str, object]]:
    """What is told of each stage, in the order they run."""
    from posttrain.core.config.dag import makes
    from posttrain.pipelines.cli.arithmetic import arithmetic

    rows: list[dict[str, object]] = []
    for name in order:
        stage = config.stages[name]
        cached, reason = status.get(name, (False, Reason("unknown")))
        row: dict[str, object] = {
            "stage": name,
            "kind": stage.kind,
            "reads": dict(stage.inputs),
            "makes": makes(stage),
            "cached": cached,
            "reason": str(reason),
            "changes": [asdict(change) for change in reason.changes],
            "arithmetic": arithmetic(stage, config),
        }
        rows.append(row)
    return rows


def print_stages(rows: list[dict[str, object]], console: Console) -> None:
    """Print the DAG table and the arithmetic."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="Stages, in order", title_justify="left")
    for heading in ("stage", "kind", "reads", "makes", "cached"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        reads = row["reads"]
        assert isinstance(reads, dict)
        inputs = "\n".join(f"{role}: {source}" for role, source in reads.items())
        cached = "yes" if row["cached"] else f"no: {row['reason']}"
        cells = (row["stage"], row["kind"], inputs, row["makes"], cached)
        table.add_row(*(escape(str(cell)) for cell in cells))
    console.print(table, soft_wrap=False)
    for row in rows:
        console.print(f"{row['stage']}: {row['arithmetic']}", markup=False)


def print_reasons(rows: list[dict[str, object]], console: Console) -> None:
    """Print all that differs, a line each, of the stages that run again."""
    for row in rows:
        changes = row["changes"]
        assert isinstance(changes, list)
        if changes:
            console.print(f"\n{row['stage']} runs because of:", markup=False)
        for change in changes:
            console.print(f"  {Change(**change)}", markup=False)


def print_costs(costs: Costs, console: Console) -> None:
    """Print the estimates, what they rest on, and what was measured for them."""
    from rich.table import Table

    from posttrain.pipelines.progress import duration

    console.print(f"\nmodel {costs.model}", markup=False)
    if not costs.stages:
        return
    table = Table(title="Estimates", title_justify="left")
    for heading in ("stage", "a step", "in all", "memory at the peak", "disk"):
        table.add_column(heading, justify="left" if heading == "stage" else "right")
    for name, row in costs.stages.items():
        table.add_row(name, *_cells(row))
    total = costs.total
    table.add_row("all", "", duration(total["seconds"]), *_sizes(total), style="bold")
    console.print(table, soft_wrap=False)
    measured = ", ".join(f"{name} {value:,.3g}" for name, value in costs.measured.items())
    console.print(f"measured here: {measured}", markup=False)
    for note in costs.notes:
        console.print(note, markup=False)


def _cells(row: Mapping[str, object]) -> tuple[str, ...]:
    from posttrain.pipelines.progress import duration

    if "seconds" not in row:
        return "not known", "not known", *_sizes(row)
    step = f"{number(row['step_s']):.3g} s" if row["steps"] else ""
    return step, duration(number(row["seconds"])), *_sizes(row)


def _sizes(row: Mapping[str, object]) -> tuple[str, str]:
    disk, most = number(row["disk_gb"]), number(row["disk_peak_gb"])
    beside = f" (at most {most:.2f})" if most > disk else ""
    return f"{number(row['memory_gb']):.2f} GB", f"{disk:.2f} GB{beside}"


def number(value: object) -> float:
    """A figure of a row."""
    assert isinstance(value, int | float), f"{value!r} is no number"
    return float(value)
