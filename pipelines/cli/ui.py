"""`posttrain ui`: the MLflow and Prefect pages of one home, on this machine only."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from posttrain.core.errors import ResourceError
from posttrain.core.runtime.processes import ServerProcess
from posttrain.pipelines.cli.common import EXIT_INTERRUPTED, CommandContext, command, interrupt
from posttrain.pipelines.services.listening import HOST, answers, check_port

EPILOG = (
    "Examples:\n\n"
    "  posttrain ui\n\n"
    "  posttrain ui --home /data/runs --mlflow-port 5001 --no-prefect\n\n"
    "Ctrl-C stops both servers."
)
START_SECONDS = 180.0


@command(reads_mlflow=True)
def ui(
    context: CommandContext,
    mlflow_port: Annotated[int, typer.Option(min=1, max=65535)] = 5000,
    prefect_port: Annotated[int, typer.Option(min=1, max=65535)] = 4200,
    no_prefect: Annotated[bool, typer.Option("--no-prefect", help="MLflow only.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Check that both answer, then stop and exit 0.")
    ] = False,
) -> None:
    """Serve the MLflow and Prefect pages of a home on 127.0.0.1 until Ctrl-C."""
    specs = [mlflow_spec(context.home, mlflow_port)]
    if not no_prefect:
        specs.append(prefect_spec(context.home, prefect_port))
    for spec in specs:
        check_port(spec.port, spec.option, spec.name)
    if len({spec.port for spec in specs}) < len(specs):
        raise ResourceError(
            f"port {mlflow_port} cannot serve both MLflow and Prefect; give them two ports"
        )
    prepare_home(context.home)
    signal.signal(signal.SIGTERM, interrupt)
    servers: list[Server] = []
    try:
        servers += [Server(spec) for spec in specs]
        urls = {spec.name: f"http://{HOST}:{spec.port}" for spec in specs}
        for server in servers:
            server.wait_until_ready(START_SECONDS)
            print(f"{server.spec.name:<8} {urls[server.spec.name]}", flush=True)
        # Not a `Result`: who starts the servers needs their addresses while they run.
        context.print_json({"status": "ok"} | {name.lower(): url for name, url in urls.items()})
        if not check:
            print("Ctrl-C stops both", flush=True)
            _watch(servers)
    except KeyboardInterrupt:
        print("stopping", flush=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    finally:
        stop_all(servers)


def _watch(servers: list[Server]) -> None:
    """Sleep until interrupted; `ResourceError` when a server ends by itself."""
    while True:
        for server in servers:
            if server.exit_code is not None:
                server.wait_until_ready(0)
        time.sleep(0.5)


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
    """Prefect over the home's database, without the services that write to it."""
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


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """How a server is started and how its readiness is seen; `environment` is all it gets."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    port: int
    option: str
    health: Sequence[str]
    log: Path


class Server(ServerProcess):
    """A running server, stopped with all its children, also when this process is killed."""

    def __init__(self, spec: ServerSpec) -> None:
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(spec.command, spec.environment, spec.log)
        self.spec = spec

    def wait_until_ready(self, seconds: float) -> None:
        """Return once every health URL answers 200; `ResourceError` with the log's end if not."""
        deadline = time.monotonic() + seconds
        waiting = list(self.spec.health)
        while waiting:
            if self.exit_code is not None:
                self._fail(f"stopped with exit code {self.exit_code}")
            if answers(waiting[0]):
                waiting.pop(0)
            elif time.monotonic() > deadline:
                self._fail(f"did not answer at {waiting[0]} within {seconds:.0f} s")
            else:
                time.sleep(0.2)

    def _fail(self, what: str) -> None:
        last = self.log_tail(1).strip() or "nothing"
        raise ResourceError(
            f"the {self.spec.name} server {what}; its log {self.log} ends with: {last}"
        )


def stop_all(servers: Sequence[Server]) -> None:
    """Stop all servers at once."""
    for server in servers:
        server.begin_stop()
    for server in servers:
        server.stop()
