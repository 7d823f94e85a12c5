"""`posttrain verify`: whether a model is what its record says, back to its data."""

from __future__ import annotations

import secrets
from typing import Annotated

import typer

from posttrain.core.errors import ConfigError
from posttrain.pipelines.cli.chat import ModelArgument
from posttrain.pipelines.cli.common import EPILOG_CODES, CommandContext, Result, command
from posttrain.pipelines.cli.reports import result_of

EPILOG = (
    "Examples:\n\n"
    "  posttrain verify 3f2a9c\n\n"
    "  posttrain verify models:/quickstart@candidate --steps 6 --json\n\n"
    "  posttrain verify 3f2a9c/sft --steps 0        digests only\n\n"
    "  posttrain verify ./my-model                  a folder that `posttrain export` wrote\n\n"
    "Weights, settings, data, plugins and code are compared by digest back to the base model, and "
    "random steps are computed again. The table says of each check: equal, differs, not checked. "
    "Exit code 1: something differs, or nothing could be compared. docs/verify.md\n\n"
    + EPILOG_CODES
)


@command(store=True, reads_mlflow=True)
def verify(
    context: CommandContext,
    model: ModelArgument,
    steps: Annotated[
        int,
        typer.Option(
            min=0,
            help="Steps to compute again, spread over the training stages; more than there are: "
            "all.",
        ),
    ] = 2,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0, help="Draws the steps.  \\[default: a new one, so that no one can know which]"
        ),
    ] = None,
    expect: Annotated[
        str | None,
        typer.Option(
            metavar="SHA256",
            help="Digest of the folder's attestation.json that its author published.",
        ),
    ] = None,
) -> Result:
    """Check a model against its record: digests of everything it comes from, steps computed again.

    Reads only the home, the store and the inputs of the run; needs no network.
    """
    from posttrain.core.models.quiet import quiet_libraries
    from posttrain.pipelines.analysis.verify import Asked
    from posttrain.pipelines.analysis.verify import verify as verified
    from posttrain.pipelines.run.progress import make_reporter

    if expect is not None and (len(expect) < 8 or set(expect.lower()) - set("0123456789abcdef")):
        raise ConfigError(f"--expect {expect}: expected 8 or more hexadecimal digits of a sha256")
    quiet_libraries()
    asked = Asked(model, steps, secrets.randbelow(10**6) if seed is None else seed, expect or "")
    with make_reporter(json=context.as_json, plain=True) as reporter:
        done = verified(asked, context.home, context.store, reporter)
    report = done.report()
    report.show(context.console())
    context.say(done.verdict())
    if done.attestation:
        context.say(f"attestation: {done.attestation}")
    return result_of(report, exit_code=1 if done.failed else 0)
