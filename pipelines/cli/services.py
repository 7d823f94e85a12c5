"""`posttrain services`: PostgreSQL, Prefect, MLflow and a worker on this machine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.core.errors import ResourceError
from posttrain.pipelines.cli.common import (
    DEFAULT_HOME,
    Boundary,
    DebugOption,
    HomeOption,
    JsonOption,
    print_json,
)

if TYPE_CHECKING:
    from posttrain.pipelines.services.layout import Ports

app = typer.Typer(
    no_args_is_help=True,
    help="PostgreSQL, a Prefect server, an MLflow server and a worker on 127.0.0.1.",
)
PortOption = Annotated[int | None, typer.Option(min=1, max=65535, show_default=False)]


def _say(text: str) -> None:
    """Progress goes to stderr: standard output is for the shell to evaluate."""
    print(text, file=sys.stderr, flush=True)


@app.command("up", epilog='Example:\n\n  eval "$(posttrain services up)"')
def up(
    home: HomeOption = DEFAULT_HOME,
    postgres_port: PortOption = None,
    prefect_port: PortOption = None,
    mlflow_port: PortOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Start what does not run yet, wait until all of it answers, print what to export.

    State and logs are below HOME/services. Ports are kept from one start to the next.
    """
    home = home.expanduser().resolve()
    with Boundary(as_json=as_json, debug=debug, log_home=home):
        from posttrain.pipelines.services.layout import Layout, Ports, exports
        from posttrain.pipelines.services.manage import up as start_all

        kept = Layout(home).ports() or Ports()
        ports = Ports(
            postgres_port or kept.postgres, prefect_port or kept.prefect, mlflow_port or kept.mlflow
        )
        _check_distinct(ports)
        start_all(home, ports, _say)
        variables = exports(ports)
        if as_json:
            print_json({"status": "ok", "home": str(home), **variables})
            return
        _say("all services are up; runs report to them in a shell with:")
        for name, value in variables.items():
            print(f"export {name}={value}", flush=True)


def _check_distinct(ports: Ports) -> None:
    if len({ports.postgres, ports.prefect, ports.mlflow}) < 3:
        raise ResourceError(f"the three servers need three ports, not {ports}")


@app.command("down")
def down(
    home: HomeOption = DEFAULT_HOME, as_json: JsonOption = False, debug: DebugOption = False
) -> None:
    """Stop the services of a home and the runs of its worker; data stay."""
    home = home.expanduser().resolve()
    with Boundary(as_json=as_json, debug=debug, log_home=home):
        from posttrain.pipelines.services.manage import down as stop_all

        stop_all(home, _say)
        _say(f"no service of {home} runs")
        if as_json:
            print_json({"status": "ok"})


@app.command("status", epilog="Exit codes: 0 all are up, 4 at least one is not.")
def status(
    home: HomeOption = DEFAULT_HOME, as_json: JsonOption = False, debug: DebugOption = False
) -> None:
    """Which services run, where they listen and where they log."""
    home = home.expanduser().resolve()
    with Boundary(as_json=as_json, debug=debug):
        from posttrain.pipelines.services.layout import Layout, exports
        from posttrain.pipelines.services.manage import status as look

        states = look(home)
        for item in states:
            how = "up" if item.ready else "down" if item.pid is None else "not answering"
            where = item.address if item.pid else ""
            print(f"{item.service:<9} {how:<14} {where:<26} log: {item.log}", file=sys.stderr)
        ports = Layout(home).ports()
        whole = bool(states) and all(item.ready for item in states)
        if as_json:
            rows = {item.service: {"pid": item.pid, "ready": item.ready} for item in states}
            print_json({"up": whole, "services": rows, "home": str(home)})
        elif whole and ports is not None:
            for name, value in exports(ports).items():
                print(f"export {name}={value}")
        if not whole:
            if not states:
                _say(f"no services in {home}; start them with: posttrain services up")
            raise typer.Exit(ResourceError.exit_code)
