"""`posttrain blame`: what a model was made of, and by what."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from posttrain.pipelines.cli.common import EPILOG_CODES, CommandContext, Result, command

EPILOG = (
    "Examples:\n\n"
    "  posttrain blame quickstart@candidate\n\n"
    "  posttrain blame quickstart/3 --json\n\n"
    "  posttrain blame .posttrain/artifacts/rl-2f6c11d0a4b39e58/model\n\n"
    "Settings that differ from the algorithm's preset are shown as DEFAULT -> VALUE.\n\n"
    + EPILOG_CODES
)


@command(store=True, reads_mlflow=True)
def blame(
    context: CommandContext,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A registered model (NAME, NAME@ALIAS, NAME/VERSION), a folder, MLflow's id of a "
            "model, a run's id, or RUN/STAGE.",
        ),
    ],
) -> Result:
    """Walk back from a model to its data, settings, plugins and base model."""
    from posttrain.pipelines.run.blame import Blame, lines

    walked = Blame(context.home, context.store)
    past = walked.of(model)
    for line in [*lines(past), *(f"note: {note}" for note in walked.notes)]:
        context.say(line)
    found = [asdict(item) for item in past]
    return Result({"model": model, "notes": walked.notes, "past": found})
