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
from posttrain.pipelines.cli.sweep import as_json, described
from posttrain.pipelines.run.checks import resolve_configs

EPILOG = (
    "Examples:\n\n"
    "  posttrain validate quickstart\n\n"
    "  posttrain validate my.yaml --set stages.rl.prompts_per_step=8\n\n" + EPILOG_CODES
)


@command(store=True)
def validate(
    context: CommandContext, configs: ConfigsArgument, overrides: SetOption = None
) -> Result:
    """Check a config, its variants, plugins, DAG, model and data. Writes nothing."""
    resolved, manager = resolve_configs(configs, overrides)
    from posttrain.pipelines.api.validated import validated
    from posttrain.pipelines.sweep.branches import checked_variants

    found = validated(resolved, manager, context.home, context.store)
    *lines, verdict = found.lines()
    variants = checked_variants(resolved, configs, overrides, context.home)
    for line in (*lines, *(described(variants) if variants else ()), verdict):
        context.say(line)
    more = {"sweep": as_json(variants)} if variants else {}
    return Result(
        {
            "status": "ok",
            "order": list(found.order),
            "plugins": {name: [use._asdict() for use in u] for name, u in found.plugins.items()},
            "notes": list(found.notes),
            "warnings": list(found.warnings),
            **more,
        }
    )
