"""`posttrain blame`: what a model was made of, and by what."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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

if TYPE_CHECKING:
    from posttrain.pipelines.blame import Blame, Blamed

EPILOG = (
    "Examples:\n\n"
    "  posttrain blame quickstart@candidate\n\n"
    "  posttrain blame quickstart/3 --json\n\n"
    "  posttrain blame .posttrain/artifacts/rl-2f6c11d0a4b39e58/model\n\n"
    "Settings are told as DEFAULT -> VALUE: all that differ from those of the algorithm's preset, "
    "and no others.\n\n" + EPILOG_CODES
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
            past, walked = _blame(model, home, shared)
        from posttrain.pipelines.blame_text import lines, to_json

        console = text_console(as_json)
        for line in lines(past):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        for note in walked.notes:
            console.print(f"note: {note}", markup=False, soft_wrap=True)
        if as_json:
            print_json(to_json(model, past, walked.notes))


def _blame(model: str, home: Path, store: Path) -> tuple[list[Blamed], Blame]:
    from posttrain.pipelines.blame import Blame

    walked = Blame(home, store)
    return walked.of(model), walked
