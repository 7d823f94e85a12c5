"""`posttrain validate`: everything that can be checked without running or writing anything."""

from __future__ import annotations

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

EPILOG = (
    "Examples:\n\n"
    "  posttrain validate quickstart\n\n"
    "  posttrain validate my.yaml --set stages.rl.prompts_per_step=8\n\n" + EPILOG_CODES
)


def validate(
    configs: ConfigsArgument,
    overrides: SetOption = None,
    home: HomeOption = DEFAULT_HOME,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Check a config, its plugins, its DAG, its model and its data. Writes nothing."""
    with Boundary(as_json=as_json, debug=debug):
        with stdout_to_stderr(as_json):
            resolved, manager = resolve_configs(configs, overrides)
            from posttrain.pipelines.base_model import find_base, with_model
            from posttrain.pipelines.cli.checks import check_inputs

            found = find_base(resolved.config.model, home.expanduser())
            inputs = check_inputs(with_model(resolved, found.section), manager)
        config = resolved.config
        console = text_console(as_json)
        for split, problem in inputs.problems.items():
            text = f"{split} problem: {problem.prompt!r} -> {problem.answer!r}"
            console.print(text, markup=False)
        console.print(
            f"ok: {len(resolved.order)} stages ({', '.join(resolved.order)}), "
            f"task '{config.task.name}', model {config.model.source}",
            markup=False,
        )
        if as_json:
            plugins = {name: [use._asdict() for use in u] for name, u in resolved.plugins.items()}
            print_json({"status": "ok", "order": list(resolved.order), "plugins": plugins})
