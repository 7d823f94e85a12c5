"""`posttrain rollback`: the champion's alias goes back to the champion before."""

from __future__ import annotations

from typing import Annotated

import typer

from posttrain.core.errors import ResourceError
from posttrain.pipelines.cli.common import EPILOG_CODES, CommandContext, Result, command

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
    name: Annotated[str, typer.Argument(metavar="NAME", help="The registered model.")],
    to: Annotated[
        str | None, typer.Option(metavar="VERSION", help="This version, instead of the one before.")
    ] = None,
    alias: Annotated[str, typer.Option(help="The alias that moves.")] = "champion",
    reason: Annotated[
        str, typer.Option(help="Why, kept with the version.", show_default=False)
    ] = "",
) -> Result:
    """Make the previous champion the champion again."""
    from posttrain.pipelines.run.model_reference import tracking_uri
    from posttrain.pipelines.run.rollback import roll_back

    uri = tracking_uri(context.home)
    if uri is None:
        raise ResourceError(
            f"there is no MLflow database in {context.home}: give the --home of the runs, or set "
            "MLFLOW_TRACKING_URI"
        )
    done = roll_back(uri, name, alias, to, reason)
    context.say(done.described())
    return Result({"status": "ok", **done.row()})
