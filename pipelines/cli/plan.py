"""`posttrain plan`: what a run would do, what is cached and why not, and what it would cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.pipelines.cli.common import (
    DEFAULT_HOME,
    EPILOG_CODES,
    Boundary,
    ConfigsArgument,
    DebugOption,
    HomeOption,
    JsonOption,
    SetOption,
    print_json,
    resolve_configs,
    stdout_to_stderr,
    text_console,
)

if TYPE_CHECKING:
    from rich.console import Console

    from posttrain.core.config.schema import RunConfig

EPILOG = (
    "Examples:\n\n"
    "  posttrain plan quickstart\n\n"
    "  posttrain plan my.yaml --set stages.rl.num_generations=16\n\n" + EPILOG_CODES
)


def plan(
    configs: ConfigsArgument,
    overrides: SetOption = None,
    home: HomeOption = DEFAULT_HOME,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show the DAG, what is cached and why not, the batch arithmetic and rough costs."""
    home = home.expanduser().resolve()
    with Boundary(as_json=as_json, debug=debug):
        with stdout_to_stderr(as_json):
            resolved, manager = resolve_configs(configs, overrides)
            from posttrain.pipelines.planning import plan_stages

            plans = plan_stages(resolved, home, manager)
            status = {stage.name: (stage.cached, stage.reason) for stage in plans}
        rows = stage_rows(resolved.config, resolved.order, status)
        known = model_note(resolved.config)
        print_plan(rows, known, text_console(as_json))
        if as_json:
            print_json({"name": resolved.config.name, "model": known, "stages": rows})


def model_note(config: RunConfig) -> str:
    """One sentence on the size of the base model and how it is known."""
    from posttrain.pipelines.cli.estimates import count_parameters

    found = count_parameters(config.model)
    if found is None:
        return f"{config.model.source}: its size is not known here, so there are no estimates"
    return f"{config.model.source}: {found[0] / 1e6:,.1f} M parameters ({found[1]})"


def stage_rows(
    config: RunConfig, order: tuple[str, ...], status: dict[str, tuple[bool, str]]
) -> list[dict[str, object]]:
    """What is told of each stage, in the order they run; estimates only when the size is known."""
    import torch

    from posttrain.core.config.dag import makes
    from posttrain.pipelines.cli.estimates import arithmetic, count_parameters, estimate

    found = count_parameters(config.model)
    on_gpu = config.model.device != "cpu" and torch.cuda.is_available()
    rows: list[dict[str, object]] = []
    for name in order:
        stage = config.stages[name]
        cached, reason = status.get(name, (False, "unknown"))
        row: dict[str, object] = {
            "stage": name,
            "kind": stage.kind,
            "reads": dict(stage.inputs),
            "makes": makes(stage),
            "cached": cached,
            "reason": reason,
            "arithmetic": arithmetic(stage, config),
        }
        if found is not None:
            figures = estimate(stage, config, found[0], on_gpu=on_gpu)
            row |= {
                "memory_gb": round(figures.memory_gb, 2),
                "disk_gb": round(figures.disk_gb, 2),
                "seconds": round(figures.seconds, 1),
            }
        rows.append(row)
    return rows


def print_plan(rows: list[dict[str, object]], known: str, console: Console) -> None:
    """Print the DAG table, the arithmetic and the estimates."""
    from rich.markup import escape
    from rich.table import Table

    from posttrain.pipelines.progress import duration

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
    console.print(f"\nmodel {known}", markup=False)
    todo = [row for row in rows if not row["cached"] and "seconds" in row]
    if not todo:
        return
    memory = max(_number(row["memory_gb"]) for row in todo)
    disk = sum(_number(row["disk_gb"]) for row in todo)
    seconds = sum(_number(row["seconds"]) for row in todo)
    for row in todo:
        spent = duration(_number(row["seconds"]))
        figures = f"{row['memory_gb']} GB memory, {row['disk_gb']} GB disk, {spent}"
        console.print(f"{row['stage']}: about {figures}", markup=False)
    console.print(
        f"in all, as a rough estimate: {memory:.1f} GB of memory at the peak beside activations, "
        f"{disk:.1f} GB of disk, {duration(seconds)}",
        markup=False,
    )


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)
