"""`posttrain blame`: what a model was made of, and by what."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from posttrain.pipelines.cli.common import (
    DEFAULT_HOME,
    EPILOG_CODES,
    Boundary,
    DebugOption,
    HomeOption,
    JsonOption,
    StoreOption,
    folders,
    print_json,
    stdout_to_stderr,
    text_console,
)

EPILOG = (
    "Examples:\n\n"
    "  posttrain blame quickstart@candidate\n\n"
    "  posttrain blame quickstart/3 --json\n\n"
    "  posttrain blame .posttrain/artifacts/rl-2f6c11d0a4b39e58/model\n\n"
    "Settings are shown as DEFAULT -> VALUE: those that differ from the algorithm's preset.\n\n"
    + EPILOG_CODES
)


def blame(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A registered model (NAME, NAME@ALIAS, NAME/VERSION), a folder, MLflow's id of a "
            "model, or a run's id.",
            show_default=False,
        ),
    ],
    home: HomeOption = DEFAULT_HOME,
    store: StoreOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Walk back from a model to its data, settings, plugins and base model."""
    home, shared = folders(home, store)
    with Boundary(as_json=as_json, debug=debug):
        with stdout_to_stderr(as_json):
            from posttrain.pipelines.analysis.blame import Blame, lines

            walked = Blame(home, shared)
            past = walked.of(model)
        console = text_console(as_json)
        for line in [*lines(past), *(f"note: {note}" for note in walked.notes)]:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        if as_json:
            found = [asdict(item) for item in past]
            print_json({"model": model, "notes": walked.notes, "past": found})
