"""`posttrain run`: run a pipeline, show its progress, then the summary and where to look."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.core.store import urls
from posttrain.pipelines.api.calls import given_answers, run_configs
from posttrain.pipelines.cli.common import (
    EPILOG_CODES,
    CommandContext,
    ConfigsArgument,
    PlainOption,
    Result,
    SetOption,
    command,
)

if TYPE_CHECKING:
    from posttrain.core.runtime.reporter import Reporter
    from posttrain.core.store.approval import Answer, ApprovalNeeded, ApprovalRequest
    from posttrain.pipelines.run.gates import Ask
    from posttrain.pipelines.run.progress import PlainReporter, RichReporter

EPILOG = (
    "Examples:\n\n"
    "  posttrain run quickstart\n\n"
    "  posttrain run my.yaml --set stages.rl.steps=3 --set stages.rl.algorithm=dr_grpo\n\n"
    "  posttrain run base.yaml more.yaml --home /data/runs --json\n\n"
    "  posttrain run my.yaml --store /shared/stages\n\n"
    "  posttrain run my.yaml --store s3://bucket/stages\n\n"
    "The same command after an interruption continues the run.\n\n"
    "A stage of kind approve asks on a terminal. Where there is none the run ends with exit code 5 "
    "and says how to answer; the answer continues it:\n\n"
    "  posttrain run my.yaml --approve gate --reason 'samples read well'\n\n"
    "  posttrain run my.yaml --reject gate --reason 'forgot how to subtract'\n\n"
    "  posttrain run my.yaml --approve all    (beforehand, every gate)\n\n"
    "A rejection ends the run with exit code 6. A config with a new_data stage ends at once, with "
    "0, where no rows are new.\n\n" + EPILOG_CODES
)


@command(store=True, interrupted="interrupted; the same command continues the run")
def run(
    context: CommandContext,
    configs: ConfigsArgument,
    overrides: SetOption = None,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Start again instead of continuing an interrupted run."),
    ] = False,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Compute every stage, also those already computed.")
    ] = False,
    plain: PlainOption = False,
    approve: Annotated[
        list[str] | None,
        typer.Option(metavar="STAGE", help="Answer this gate with yes; all = every gate."),
    ] = None,
    reject: Annotated[
        list[str] | None, typer.Option(metavar="STAGE", help="Answer this gate with no.")
    ] = None,
    reason: Annotated[
        str, typer.Option(help="Why, kept with the answer.", show_default=False)
    ] = "",
) -> Result:
    """Run the pipeline of a config. Stages that were computed before are reused."""
    from posttrain.pipelines.run.prefect_server import OwnServer

    server = OwnServer(context.home)  # first of all: it starts while everything else is loaded
    from posttrain.core.store.approval import ApprovalNeeded

    answers = given_answers(approve, reject, reason)
    try:
        result, _, _ = run_configs(
            configs,
            overrides,
            context.home,
            context.store,
            lambda: shown(as_json=context.as_json, plain=plain),
            server,
            fresh=fresh,
            no_cache=no_cache,
            answers=answers,
        )
    except ApprovalNeeded as needed:
        return _waiting(needed, context, configs, overrides)
    from posttrain.pipelines.run.summary import next_commands, print_summary, to_json

    print_summary(result, context.console())
    if not context.as_json and result.status == "completed":
        print("\nnext:")
        for line in next_commands(result, context.options()):
            print(f"  {line}")
    done = result.status in ("completed", "no_new_data")
    return Result(to_json(result), exit_code=0 if done else 1)


def _waiting(
    needed: ApprovalNeeded,
    context: CommandContext,
    configs: Sequence[Path],
    overrides: Sequence[str] | None,
) -> Result:
    """What the run waits for, and the commands that answer."""
    assert needed.request is not None, "gates raise it with their request"
    own = context.store == context.home / "artifacts"
    store = None if own else urls.shown(context.store)
    stage = needed.request.stage
    commands = answering_command(configs, overrides, context.home, store, stage)
    print(f"waiting: {needed}", file=sys.stderr)
    for decision, words in commands.items():
        print(f"  to {decision}: {words}", file=sys.stderr)
    return Result(
        {
            "status": "waiting",
            "exit_code": needed.exit_code,
            "stage": stage,
            "message": str(needed),
            "commands": commands,
            "evidence": needed.request.markdown,
        },
        exit_code=needed.exit_code,
    )


@contextmanager
def shown(*, as_json: bool, plain: bool) -> Iterator[tuple[Reporter, Ask | None]]:
    """What shows the progress and asks at gates; imported once the config is known to be right."""
    from posttrain.pipelines.run.progress import make_reporter

    with make_reporter(json=as_json, plain=plain) as reporter:
        yield reporter, terminal_ask(reporter, as_json=as_json)


def terminal_ask(reporter: PlainReporter | RichReporter, *, as_json: bool) -> Ask | None:
    """What asks the person at the terminal; None where nobody is."""
    if as_json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return None

    def ask(request: ApprovalRequest) -> Answer | None:
        with reporter.paused():
            return _prompt(request)

    return ask


def _prompt(request: ApprovalRequest) -> Answer | None:
    """Show the evidence, read the decision and its reason; None at the end of the input."""
    from posttrain.core.store.approval import Answer, this_person

    print(f"\n=== stage '{request.stage}' asks for approval ===\n\n{request.markdown}")
    try:
        word = ""
        while word not in ("approve", "reject"):
            word = input("approve or reject? ").strip().lower()
        reason = input("why? ")
    except EOFError:
        print()
        return None
    return Answer.now(word == "approve", this_person(), reason, "terminal")


def answering_command(
    configs: Sequence[Path],
    overrides: Sequence[str] | None,
    home: Path,
    store: str | None,
    stage: str,
) -> dict[str, str]:
    """The commands that continue this run with an answer, by decision."""
    words = ["posttrain", "run", *map(str, configs)]
    for override in overrides or ():
        words += ["--set", override]
    words += ["--home", str(home)]
    if store is not None:
        words += ["--store", store]
    return {
        decision: shlex.join([*words, f"--{decision}", stage, "--reason", "..."])
        for decision in ("approve", "reject")
    }
