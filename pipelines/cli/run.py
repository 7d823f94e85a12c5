"""`posttrain run`: run a pipeline, show its progress, then the summary and where to look."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from posttrain.core.errors import ApprovalNeeded
from posttrain.pipelines.cli.answers import answering_command, given_answers, terminal_ask
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

EPILOG = (
    "Examples:\n\n"
    "  posttrain run quickstart\n\n"
    "  posttrain run my.yaml --set stages.rl.steps=3 --set stages.rl.algorithm=dr_grpo\n\n"
    "  posttrain run base.yaml more.yaml --home /data/runs --json\n\n"
    "  posttrain run my.yaml --store /shared/stages\n\n"
    "The same command after an interruption continues the run.\n\n"
    "A stage of kind approve asks on a terminal. Where there is none the run ends with exit code 5 "
    "and says how to answer; the answer continues it:\n\n"
    "  posttrain run my.yaml --approve gate --reason 'samples read well'\n\n"
    "  posttrain run my.yaml --reject gate --reason 'forgot how to subtract'\n\n"
    "  posttrain run my.yaml --approve all    (beforehand, every gate)\n\n"
    "A rejection ends the run with exit code 6. A config with a new_data stage ends at once, with "
    "0, where no rows are new.\n\n" + EPILOG_CODES
)


def run(
    configs: ConfigsArgument,
    overrides: SetOption = None,
    home: HomeOption = DEFAULT_HOME,
    store: StoreOption = None,
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
    approve: Annotated[
        list[str] | None,
        typer.Option(
            "--approve", metavar="STAGE", help="Answer this gate with yes; all = every gate."
        ),
    ] = None,
    reject: Annotated[
        list[str] | None,
        typer.Option("--reject", metavar="STAGE", help="Answer this gate with no."),
    ] = None,
    reason: Annotated[
        str, typer.Option("--reason", help="Why, kept with the answer.", show_default=False)
    ] = "",
    debug: DebugOption = False,
) -> None:
    """Run the pipeline of a config. Stages that were computed before are reused."""
    # Over 60 lines: half of them are the command's options.
    from posttrain.pipelines.prefect_server import OwnServer

    home, shared = folders(home, store)
    server = OwnServer(home)
    with Boundary(as_json=as_json, debug=debug):
        resolved, manager = resolve_configs(configs, overrides)
        from posttrain.pipelines.cli.checks import check_inputs

        answers = given_answers(approve, reject, reason)
        check_inputs(resolved, manager)
    interrupted = "interrupted; the same command continues the run"
    waiting: ApprovalNeeded | None = None
    with Boundary(as_json=as_json, debug=debug, log_home=home, interrupted=interrupted):
        with stdout_to_stderr(as_json):
            from posttrain.pipelines.progress import make_reporter
            from posttrain.pipelines.run import RunOptions, execute

            with make_reporter(json=as_json, plain=plain) as reporter:
                options = RunOptions(
                    home=home,
                    store=shared,
                    fresh=fresh,
                    no_cache=no_cache,
                    answers=answers,
                    ask=terminal_ask(reporter, as_json=as_json),
                    server=server,
                )
                try:
                    result = execute(resolved, manager, options, reporter)
                except ApprovalNeeded as needed:
                    waiting = needed
        if waiting is not None:
            _tell_waiting(
                waiting,
                answering_command(configs, overrides, home, store and shared, _stage(waiting)),
                as_json,
            )
            raise typer.Exit(waiting.exit_code)
        from posttrain.pipelines.summary import print_summary, to_json

        print_summary(result, text_console(as_json))
        if as_json:
            print_json(to_json(result))
        if result.status not in ("completed", "no_new_data"):
            raise typer.Exit(1)


def _stage(needed: ApprovalNeeded) -> str:
    assert needed.request is not None, "gates raise it with their request"
    return needed.request.stage


def _tell_waiting(needed: ApprovalNeeded, commands: dict[str, str], as_json: bool) -> None:
    """What is waited for, and the commands that answer."""
    print(f"waiting: {needed}", file=sys.stderr)
    for decision, command in commands.items():
        print(f"  to {decision}: {command}", file=sys.stderr)
    if as_json:
        told = {"status": "waiting", "exit_code": needed.exit_code, "stage": _stage(needed)}
        evidence = "" if needed.request is None else needed.request.markdown
        print_json(told | {"message": str(needed), "commands": commands, "evidence": evidence})
