"""`posttrain services`: PostgreSQL, Prefect, MLflow and a worker on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.core.errors import ResourceError
from posttrain.pipelines.cli.common import CommandContext, Result, command, say_aside

if TYPE_CHECKING:
    from posttrain.pipelines.services.layout import Ports

app = typer.Typer(
    no_args_is_help=True,
    help="PostgreSQL, a Prefect server, an MLflow server and a worker on 127.0.0.1.",
)
PortOption = Annotated[int | None, typer.Option(min=1, max=65535, show_default=False)]


@app.command("up", epilog='Example:\n\n  eval "$(posttrain services up)"')
@command()
def up(
    context: CommandContext,
    postgres_port: PortOption = None,
    prefect_port: PortOption = None,
    mlflow_port: PortOption = None,
) -> Result:
    """Start what is not running, wait until all of it answers, print what to export.

    State and logs are below HOME/services. Ports are kept from one start to the next.
    """
    from posttrain.pipelines.services.layout import Layout, Ports, exports
    from posttrain.pipelines.services.manage import up as start_all

    kept = Layout(context.home).ports() or Ports()
    ports = Ports(
        postgres_port or kept.postgres, prefect_port or kept.prefect, mlflow_port or kept.mlflow
    )
    _check_distinct(ports)
    start_all(context.home, ports, say_aside)
    say_aside("all services are up; runs report to them in a shell with:")
    return Result({"status": "ok", "home": str(context.home), **_print_exports(exports(ports))})


def _check_distinct(ports: Ports) -> None:
    if len({ports.postgres, ports.prefect, ports.mlflow}) < 3:
        raise ResourceError(f"the three servers need three ports, not {ports}")


def _print_exports(variables: dict[str, str]) -> dict[str, str]:
    for name, value in variables.items():
        print(f"export {name}={value}", flush=True)
    return variables


@app.command("down")
@command()
def down(context: CommandContext) -> Result:
    """Stop the services of a home and the runs of its worker; data stay."""
    from posttrain.pipelines.services.manage import down as stop_all

    stop_all(context.home, say_aside)
    say_aside(f"no service of {context.home} runs")
    return Result({"status": "ok"})


@app.command("status", epilog="Exit codes: 0 all are up, 4 at least one is not.")
@command()
def status(context: CommandContext) -> Result:
    """Show which services run, where they listen and where they log."""
    from posttrain.pipelines.services.layout import Layout, exports
    from posttrain.pipelines.services.manage import status as look

    states = look(context.home)
    for item in states:
        how = "up" if item.ready else "down" if item.pid is None else "not answering"
        where = item.address if item.pid else ""
        say_aside(f"{item.service:<9} {how:<14} {where:<26} log: {item.log}")
    ports = Layout(context.home).ports()
    whole = bool(states) and all(item.ready for item in states)
    if whole and ports is not None:
        _print_exports(exports(ports))
    if not states:
        say_aside(f"no services in {context.home}; start them with: posttrain services up")
    rows = {item.service: {"pid": item.pid, "ready": item.ready} for item in states}
    return Result(
        {"up": whole, "services": rows, "home": str(context.home)},
        exit_code=0 if whole else ResourceError.exit_code,
    )
