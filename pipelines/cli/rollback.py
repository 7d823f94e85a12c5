"""`posttrain rollback`: the champion's alias goes back to the champion before."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.core.errors import ResourceError
from posttrain.pipelines.cli.common import EPILOG_CODES, CommandContext, Result, command

if TYPE_CHECKING:
    from posttrain.pipelines.run.rollback import RolledBack

EPILOG = (
    "Examples:\n\n"
    "  posttrain rollback quickstart --reason 'fails on long sums'\n\n"
    "  posttrain rollback quickstart --to 3\n\n"
    "The version that loses the alias is marked as taken back: no promotion brings it back, only "
    "--to does. Everything is in the tags of both versions in MLflow.\n\n" + EPILOG_CODES
)


@command(reads_mlflow=True)
def rollback(
    context: CommandContext,
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
) -> Result:
    """Make the previous champion the champion again."""
    done = _roll_back(context.home, name, alias, to, reason)
    context.console().print(done.described(), markup=False)
    return Result({"status": "ok", **done.row()})


def _roll_back(home: Path, name: str, alias: str, to: str | None, reason: str) -> RolledBack:
    from posttrain.pipelines.run.model_reference import tracking_uri

    uri = tracking_uri(home)
    if uri is None:
        raise ResourceError(
            f"there is no MLflow database in {home}: give the --home of the runs, or set "
            "MLFLOW_TRACKING_URI"
        )
    from posttrain.pipelines.run.rollback import roll_back

    return roll_back(uri, name, alias, to, reason)
