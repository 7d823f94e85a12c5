"""`posttrain run`: run a pipeline, show its progress, then the summary and where to look."""

from __future__ import annotations

from typing import Annotated

import typer

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
    "  posttrain run quickstart\n\n"
    "  posttrain run my.yaml --set stages.rl.steps=3 --set stages.rl.algorithm=dr_grpo\n\n"
    "  posttrain run base.yaml more.yaml --home /data/runs --json\n\n"
    "The same command after an interruption continues the run.\n\n" + EPILOG_CODES
)


def run(
    configs: ConfigsArgument,
    overrides: SetOption = None,
    home: HomeOption = DEFAULT_HOME,
    as_json: JsonOption = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start anew instead of continuing an interrupted run.")
    ] = False,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Compute every stage, also those already computed.")
    ] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="One line per step instead of a live display.")
    ] = False,
    debug: DebugOption = False,
) -> None:
    """Run the pipeline of a config. Stages that were computed before are reused."""
    home = home.expanduser().resolve()
    with Boundary(as_json=as_json, debug=debug):
        resolved, manager = resolve_configs(configs, overrides)
        from posttrain.pipelines.cli.checks import check_inputs

        check_inputs(resolved, manager)
    interrupted = "interrupted; the same command continues the run"
    with Boundary(as_json=as_json, debug=debug, log_home=home, interrupted=interrupted):
        with stdout_to_stderr(as_json):
            from posttrain.pipelines.progress import make_reporter
            from posttrain.pipelines.run import RunOptions, execute

            with make_reporter(json=as_json, plain=plain) as reporter:
                options = RunOptions(home=home, fresh=fresh, no_cache=no_cache)
                result = execute(resolved, manager, options, reporter)
        from posttrain.pipelines.summary import print_summary, to_json

        print_summary(result, text_console(as_json))
        if as_json:
            print_json(to_json(result))
        if result.status != "completed":
            raise typer.Exit(1)
