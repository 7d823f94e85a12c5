"""Commands that other packages bring, loaded only where help is asked for or a command is not ours.

A package names a module in its `pyproject.toml`::

    [project.entry-points."posttrain.commands"]
    my_package = "my_package.commands"

and that module has the hook `posttrain_commands`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    # Typer's own copy of click, whose classes its groups and commands are.
    from typer._click.core import Command, Context


class Commands(TyperGroup):
    """The commands of this package, then those of plugins."""

    def list_commands(self, ctx: Context) -> list[str]:
        own = super().list_commands(ctx)
        return [*own, *(name for name in plugin_commands() if name not in own)]

    def get_command(self, ctx: Context, cmd_name: str) -> Command | None:
        return super().get_command(ctx, cmd_name) or plugin_commands().get(cmd_name)


@functools.cache
def plugin_commands() -> dict[str, Command]:
    """The commands of installed packages by name.

    What cannot be loaded is one sentence on stderr, and all other commands work.
    """
    from importlib.metadata import entry_points

    found: dict[str, Command] = {}
    for entry in sorted(entry_points(group="posttrain.commands"), key=lambda entry: entry.name):
        package = entry.dist.name if entry.dist else "unknown"
        try:
            for given in entry.load().posttrain_commands():
                command = _command(given)
                if command.name in found:
                    _left_out(package, f"command '{command.name}' is offered twice; rename one")
                else:
                    found[str(command.name)] = command
        except (Exception, SystemExit) as error:  # somebody's code, which must not end ours
            _left_out(package, f"{type(error).__name__}: {error}")
    return found


def _command(given: typer.Typer | Callable[..., Any]) -> Command:
    """A typer app, or a function whose name is the command's."""
    if isinstance(given, typer.Typer):
        command = typer.main.get_command(given)
        if not command.name:
            raise ValueError("a typer app has no name: give it one, typer.Typer(name=...)")
        return command
    if not callable(given):
        raise TypeError(f"posttrain_commands returned {given!r}, not typer apps or functions")
    app = typer.Typer(add_completion=False)
    app.command(getattr(given, "__name__", "command").replace("_", "-"))(given)
    return typer.main.get_command(app)


def _left_out(package: str, why: str) -> None:
    line = " ".join(why.split())[:300]
    print(f"warning: commands of package '{package}' are left out: {line}", file=sys.stderr)
