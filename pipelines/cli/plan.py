"""`posttrain plan`: what a run would do, what is cached and why not, and what it may cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from posttrain.core.store.identity import Change, Reason
from posttrain.pipelines.cli.common import (
    EPILOG_CODES,
    CommandContext,
    ConfigsArgument,
    Result,
    SetOption,
    command,
)
from posttrain.pipelines.run.checks import resolve_configs

if TYPE_CHECKING:
    from rich.console import Console

    from posttrain.core.config.base import StageBase
    from posttrain.core.config.schema import RunConfig
    from posttrain.core.estimate.tokens import RunData

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
Device = Literal["h100", "h200", "a100", "cpu"]


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
    from posttrain.core.estimate.tokens import RunData
    from posttrain.pipelines.run.planning import plan_stages
    from posttrain.pipelines.run.rounds import look

    home, console = context.home, context.console()
    begun = look(resolved, manager, home, store=context.store)
    resolved = begun.resolved
    plans = plan_stages(resolved, home, manager, context.store, begun.rows_digest)
    status = {stage.name: (stage.cached, stage.reason) for stage in plans}
    data = RunData(resolved.config, manager)
    rows = stage_rows(resolved.config, resolved.order, status, data)
    todo = [name for name in resolved.order if not status[name][0]]
    found = _estimates(data, home, todo, device) if calibration or device else {}
    if begun.nothing_new or begun.reported:
        console.print(begun.nothing_new or begun.reported, markup=False)
    print_stages(rows, console, why=why)
    stages: Mapping[str, Mapping[str, Any]] = found.pop("stages", {})
    if found:
        print_estimates(found, stages, console)
    rows = [row | dict(stages.get(str(row["stage"]), {})) for row in rows]
    return Result({"name": resolved.config.name, **found, "stages": rows})


def stage_rows(
    config: RunConfig,
    order: Sequence[str],
    status: Mapping[str, tuple[bool, Reason]],
    data: RunData,
) -> list[dict[str, Any]]:
    """What is reported of each stage, in the order they run."""

    rows = []
    for name in order:
        stage = config.stages[name]
        cached, reason = status.get(name, (False, Reason("unknown")))
        rows.append(
            {
                "stage": name,
                "kind": stage.kind,
                "reads": dict(stage.inputs),
                "makes": stage.makes,
                "cached": cached,
                "reason": str(reason),
                "changes": [asdict(change) for change in reason.changes],
                "arithmetic": arithmetic(stage, data),
            }
        )
    return rows


def arithmetic(stage: StageBase, data: RunData) -> str:
    """The batch arithmetic of a stage in words, with the counts that the run will have."""
    from posttrain.core.config.rl_stage import RlStage
    from posttrain.core.config.schema import RegisterStage, TransformStage
    from posttrain.core.config.stages import (
        ApproveStage,
        EvaluateStage,
        NewDataStage,
        PreferenceDataStage,
        PreferenceStage,
        PromoteStage,
        SftStage,
    )

    config = data.config
    match stage:
        case EvaluateStage():
            section = stage.evaluation or config.evaluation
            problems, samples = data.count("held_out", section.num_problems), section.num_samples
            return (
                f"{problems} problems x (1 greedy + {samples} sampled) = "
                f"{problems * (1 + samples)} answers of at most {section.max_response_length} "
                "tokens"
            )
        case SftStage():
            given = data.supervised(stage)
            count = given.steps * given.batch
            what = "problems" if stage.data is None else "rows"
            again = f", {count / max(1, given.rows):.1f} passes over {given.rows} {what}"
            micro = -(-given.batch // stage.micro_batch_size)
            about = "" if stage.max_tokens_per_batch is None else "about "
            return (
                f"{about}{given.steps} steps x {given.batch} examples = {count} examples"
                f"{again if 0 < given.rows < count else ''}; {micro} micro-batch(es) a step"
            )
        case PreferenceDataStage():
            online = stage.online if isinstance(stage, PreferenceStage) else None
            if online is not None:
                answers = online.prompts_per_round * online.num_generations
                return (
                    f"{online.rounds} round(s) x {online.prompts_per_round} problems x "
                    f"{online.num_generations} answers = {online.rounds * answers} sampled; "
                    f"batches of at most {stage.batch_size} pairs, {online.steps} optimizer "
                    "step(s) in all"
                )
            found = data.preferences(stage)  # at most: rows that are too long are left out
            where = "task '" + config.task.name + "'" if stage.data == "task" else stage.data
            rows = f"{found.train + found.held_out} rows of {where}"
            if stage.data is None:
                rows = (
                    f"{stage.num_prompts} problems x {stage.num_generations} answers = "
                    f"{found.sampled} sampled; at most {found.train + found.held_out} pairs"
                )
            return (
                f"{rows}, at most {found.train} to train on and {found.held_out} held out; batches "
                f"of {stage.batch_size}, {stage.epochs} epoch(s): at most {found.steps} "
                "optimizer step(s)"
            )
        case RlStage():
            rows_a_step = stage.prompts_per_step * stage.num_generations
            mini, updates = rows_a_step // stage.num_mini_batches, stage.num_mini_batches
            tokens = stage.steps * rows_a_step * stage.generation.max_response_length
            prompts = stage.steps * stage.prompts_per_step
            problems = prompts if "dataset" in stage.inputs else data.count("train", prompts)
            again = f" ({prompts / problems:.1f} passes over {problems} problems)"
            return (
                f"{stage.prompts_per_step} prompts x {stage.num_generations} generations = "
                f"{rows_a_step} sequences per step; {stage.epochs} epoch(s) x {updates} "
                f"mini-batch(es) of {mini} = {stage.epochs * updates} optimizer step(s) per "
                f"rollout; {stage.steps} steps{again if 0 < problems < prompts else ''} sample at "
                f"most {tokens:,} tokens; {-(-mini // stage.micro_batch_size)} micro-batch(es) per "
                "optimizer step"
            )
        case TransformStage():
            problems, solutions = data.count("train", stage.num_problems), stage.num_solutions
            tokens = problems * (1 + solutions) * stage.generation.max_response_length
            asked = 0 if stage.rewrite == "rules" else tokens
            return (
                f"at most {problems} problems x (1 rewriting + {solutions} solutions), {asked:,} "
                "tokens at most; integers and closed forms need none"
            )
        case ApproveStage():
            limit = stage.timeout_hours
            return "asks a person" + ("" if limit is None else f", and waits up to {limit:g} hours")
        case PromoteStage():
            return (
                f"makes the model champion of '{stage.registered_name}' if the lower bound of the "
                f"paired difference is above {stage.min_improvement:+g}; evaluates the champion "
                "if there is one"
            )
        case NewDataStage():
            most = "all" if stage.max_rows is None else f"at most {stage.max_rows}"
            return f"takes {most} new rows; needs at least {stage.min_rows}"
        case RegisterStage():
            return f"registers as '{stage.registered_name}' with alias '{stage.alias}'"
        case _:
            return data.manager.stage(stage).describe()


def _estimates(
    data: RunData, home: Path, todo: Sequence[str], device: Device | None
) -> dict[str, Any]:
    """The estimates of the stages in `todo`, their totals, and what they are based on."""
    from posttrain.core.estimate.report import estimate_run
    from posttrain.core.models.device import ModelRuntime, set_threads
    from posttrain.pipelines.stage.engines import choose_engine, largest_request

    config = data.config
    set_threads(config.limits.num_threads)
    engine = choose_engine(config, data.manager, ModelRuntime.from_config(config.model))
    if device not in (None, "cpu") and config.engine == "auto":
        engine = "vllm"
    return estimate_run(data, home / "models", todo, engine, largest_request(config), device)


def print_stages(rows: Sequence[Mapping[str, Any]], console: Console, *, why: bool = False) -> None:
    """Print the DAG table, the arithmetic, and with `why` everything that differs."""
    from rich.markup import escape
    from rich.table import Table

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


def print_estimates(
    found: Mapping[str, Any], stages: Mapping[str, Mapping[str, Any]], console: Console
) -> None:
    """Print the estimates, and what they are based on."""
    from rich.table import Table

    from posttrain.pipelines.run.progress import duration

    console.print(f"\nmodel {found['model']}", markup=False)
    if not stages:
        return
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
