"""`posttrain doctor`: whether this machine can run posttrain, and how to mend what is wrong."""

from __future__ import annotations

from dataclasses import asdict

import typer

from posttrain.core.errors import ResourceError
from posttrain.pipelines.cli.common import (
    DEFAULT_HOME,
    Boundary,
    DebugOption,
    HomeOption,
    JsonOption,
    print_json,
    stdout_to_stderr,
    text_console,
)

EPILOG = (
    "Example:\n\n  posttrain doctor --json\n\n"
    "Exit codes: 0 usable (warnings may remain), 4 something needed is missing."
)
MARKS = {"ok": "[green]ok[/green]", "warn": "[yellow]warn[/yellow]", "bad": "[red]bad[/red]"}


def doctor(
    home: HomeOption = DEFAULT_HOME, as_json: JsonOption = False, debug: DebugOption = False
) -> None:
    """Check versions, devices, memory, disk, engines, plugins, ports and the model, with mends."""
    from rich.markup import escape
    from rich.table import Table

    home = home.expanduser().resolve()
    with Boundary(as_json=as_json, debug=debug):
        with stdout_to_stderr(as_json):
            from posttrain.pipelines.cli.findings import examine

            findings = examine(home)
        table = Table(show_lines=False)
        for heading in ("", "what", "found", "mend"):
            table.add_column(heading, overflow="fold")
        for item in findings:
            table.add_row(
                MARKS[item.status], escape(item.name), escape(item.detail), escape(item.mend)
            )
        console = text_console(as_json)
        console.print(table, soft_wrap=False)
        bad = [item for item in findings if item.status == "bad"]
        usable = not bad
        console.print("usable" if usable else f"not usable: {len(bad)} finding(s) to mend first")
        if as_json:
            print_json({"usable": usable, "findings": [asdict(item) for item in findings]})
        if not usable:
            raise typer.Exit(ResourceError.exit_code)
