"""`posttrain rollback`: the champion's alias goes back to the champion before."""

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
    print_json,
    stdout_to_stderr,
    text_console,
)

if TYPE_CHECKING:
    from posttrain.pipelines.rollback import RolledBack

EPILOG = (
    "Examples:\n\n"
    "  posttrain rollback quickstart --reason 'fails on long sums'\n\n"
    "  posttrain rollback quickstart --to 3\n\n"
    "The version that is left is marked as taken back: no promotion brings it back, only "
    "--to does. Everything is in the tags of both versions in MLflow.\n\n" + EPILOG_CODES
)


def rollback(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The registered model.", show_default=False)
    ],
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="VERSION", help="This version, instead of the one before."),
    ] = None,
    alias: Annotated[str, typer.Option("--alias", help="The alias that moves.")] = "champion",
    reason: Annotated[
        str, typer.Option("--reason", help="Why, kept with the version.", show_default=False)
    ] = "",
    home: HomeOption = DEFAULT_HOME,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Make the previous champion the champion again."""
    home = home.expanduser().resolve()
    with Boundary(as_json=as_json, debug=debug, log_home=home if home.is_dir() else None):
        with stdout_to_stderr(as_json):
            done = _roll_back(home, name, alias, to, reason)
        text_console(as_json).print(done.told(), markup=False)
        if as_json:
            print_json({"status": "ok", **done.row()})


def _roll_back(home: Path, name: str, alias: str, to: str | None, reason: str) -> RolledBack:
    from posttrain.core.errors import ResourceError
    from posttrain.pipelines.base_model import tracking_uri

    uri = tracking_uri(home)
    if uri is None:
        raise ResourceError(
            f"there is no MLflow database in {home}: give the --home of the runs, or set "
            "MLFLOW_TRACKING_URI"
        )
    from posttrain.pipelines.rollback import roll_back

    return roll_back(uri, name, alias, to, reason)
