"""`posttrain validate`: everything that can be checked without running or writing anything."""

from __future__ import annotations

from posttrain.pipelines.cli.common import (
    EPILOG_CODES,
    CommandContext,
    ConfigsArgument,
    Result,
    SetOption,
    command,
)
from posttrain.pipelines.run.checks import check_inputs, check_model, resolve_configs

EPILOG = (
    "Examples:\n\n"
    "  posttrain validate quickstart\n\n"
    "  posttrain validate my.yaml --set stages.rl.prompts_per_step=8\n\n" + EPILOG_CODES
)


@command()
def validate(
    context: CommandContext, configs: ConfigsArgument, overrides: SetOption = None
) -> Result:
    """Check a config, its plugins, its DAG, its model and its data. Writes nothing."""
    resolved, manager = resolve_configs(configs, overrides)
    from posttrain.core.store.artifacts import check_free_disk
    from posttrain.pipelines.run.model_reference import find_base
    from posttrain.pipelines.run.rounds import with_model

    found = find_base(resolved.config.model, context.home, context.store)
    local = with_model(resolved, found.section)
    inputs = check_inputs(local, manager)
    reserve = resolved.config.limits.min_free_gb
    check_free_disk(context.home, 0, reserve, "a run")
    from posttrain.pipelines.run.data_checks import check_texts  # it imports torch

    texts = check_texts(local, manager, inputs.task, context.home / "models")
    warnings = texts.warnings
    notes = [*inputs.notes, *check_model(local, manager), *texts.notes]
    config, console = resolved.config, context.console()
    for split, problem in inputs.problems.items():
        text = f"{split} problem: {problem.prompt!r} -> {problem.answer!r}"
        console.print(text, markup=False)
    for note in notes:
        console.print(f"note: {note}", markup=False)
    for warning in warnings:
        console.print(f"warning: {warning}", markup=False)
    console.print(
        f"ok: {len(resolved.order)} stages ({', '.join(resolved.order)}), "
        f"task '{config.task.name}', model {config.model.source}",
        markup=False,
    )
    plugins = {name: [use._asdict() for use in u] for name, u in resolved.plugins.items()}
    return Result(
        {
            "status": "ok",
            "order": list(resolved.order),
            "plugins": plugins,
            "notes": notes,
            "warnings": warnings,
        }
    )
