"""`posttrain ui`: the MLflow and Prefect pages of one home, on this machine only."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from posttrain.core.errors import ResourceError
from posttrain.pipelines.cli.common import (
    DEFAULT_HOME,
    EXIT_INTERRUPTED,
    Boundary,
    DebugOption,
    HomeOption,
    JsonOption,
    print_json,
)
from posttrain.pipelines.cli.servers import HOST, Server, ServerSpec, check_port, stop_all

EPILOG = (
    "Examples:\n\n"
    "  posttrain ui\n\n"
    "  posttrain ui --home /data/runs --mlflow-port 5001 --no-prefect\n\n"
    "Ctrl-C stops both servers."
)
START_SECONDS = 180.0


def ui(
    home: HomeOption = DEFAULT_HOME,
    mlflow_port: Annotated[int, typer.Option("--mlflow-port", min=1, max=65535)] = 5000,
    prefect_port: Annotated[int, typer.Option("--prefect-port", min=1, max=65535)] = 4200,
    no_prefect: Annotated[bool, typer.Option("--no-prefect", help="MLflow only.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Start, see that both answer, stop, exit 0.")
    ] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Serve the MLflow and Prefect pages of a home on 127.0.0.1 until Ctrl-C."""
    home = home.expanduser().resolve()
    text = sys.stderr if as_json else sys.stdout
    with Boundary(as_json=as_json, debug=debug):
        specs = [mlflow_spec(home, mlflow_port)]
        if not no_prefect:
            specs.append(prefect_spec(home, prefect_port))
        for spec in specs:
            check_port(spec.port, spec.option, spec.name)
        if len({spec.port for spec in specs}) < len(specs):
            raise ResourceError(
                f"port {mlflow_port} cannot serve both MLflow and Prefect; give them two ports"
            )
        prepare_home(home)
        signal.signal(signal.SIGTERM, _interrupt)
        servers: list[Server] = []
        try:
            servers += [Server(spec) for spec in specs]
            for server in servers:
                server.wait_until_ready(START_SECONDS)
                url = f"http://{HOST}:{server.spec.port}"
                print(f"{server.spec.name:<8} {url}", file=text, flush=True)
            if as_json:
                urls = {spec.name.lower(): f"http://{HOST}:{spec.port}" for spec in specs}
                print_json({"status": "ok", **urls})
            if not check:
                print("Ctrl-C stops both", file=text, flush=True)
                _watch(servers)
        except KeyboardInterrupt:
            print("stopping", file=text, flush=True)
            raise typer.Exit(EXIT_INTERRUPTED) from None
        finally:
            stop_all(servers)


def _watch(servers: list[Server]) -> None:
    """Sleep until interrupted; `ResourceError` when a server ends by itself."""
    while True:
        for server in servers:
            if not server.is_running():
                server.wait_until_ready(0)
        time.sleep(0.5)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends as Ctrl-C does, so that the servers are stopped as well."""
    raise KeyboardInterrupt


def prepare_home(home: Path) -> None:
    """Make the home's MLflow database and Prefect's folder where they are missing."""
    from posttrain.core.tracking.mlflow_store import prepare_database

    prepare_database(home)
    (home / "prefect").mkdir(parents=True, exist_ok=True)


def mlflow_spec(home: Path, port: int) -> ServerSpec:
    """MLflow over the home's database. Artifacts are local paths, which it reads directly."""
    environment = os.environ | {
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "1",
    }
    command = [
        *(sys.executable, "-m", "mlflow", "server"),
        *("--backend-store-uri", f"sqlite:///{home}/mlflow/mlflow.db"),
        *("--default-artifact-root", str(home / "mlflow" / "artifacts")),
        *("--no-serve-artifacts", "--workers", "1"),
        *("--host", HOST, "--port", str(port)),
    ]
    base = f"http://{HOST}:{port}"
    log = home / "logs" / "ui-mlflow.log"
    health = (f"{base}/health", f"{base}/")
    return ServerSpec("MLflow", command, environment, port, "--mlflow-port", health, log)


def prefect_spec(home: Path, port: int) -> ServerSpec:
    """Prefect over the home's database, without the services that write to it beside a run."""
    base = f"http://{HOST}:{port}"
    environment = os.environ | {
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_API_URL": f"{base}/api",
        "PREFECT_UI_API_URL": f"{base}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }
    command = [
        *(sys.executable, "-m", "prefect", "server", "start", "--no-services"),
        *("--host", HOST, "--port", str(port)),
    ]
    log = home / "logs" / "ui-prefect.log"
    health = (f"{base}/api/health", f"{base}/")
    return ServerSpec("Prefect", command, environment, port, "--prefect-port", health, log)
