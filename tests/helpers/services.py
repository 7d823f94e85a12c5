"""The services as a user brings them up, in a temporary home and on free ports."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from posttrain.core.runtime.processes import free_ports
from posttrain.pipelines.services.postgres import why_missing
from posttrain.pipelines.services.processes import marked
from tests.helpers.pipeline import Finished, run_command, start_command

# A worker of the tests asks for work more often than one that runs for weeks.
HASTE = {"PREFECT_WORKER_QUERY_SECONDS": "1"}


@dataclass(frozen=True)
class Services:
    """Running services: where they are, and how commands find them."""

    home: Path
    prefect_url: str
    mlflow_uri: str

    @property
    def variables(self) -> dict[str, str]:
        """What `posttrain services up` tells a user to export."""
        return {"PREFECT_API_URL": self.prefect_url, "MLFLOW_TRACKING_URI": self.mlflow_uri}

    def run(self, *arguments: str, timeout: float = 300) -> Finished:
        """`posttrain ARGUMENTS`, reporting to these services."""
        return run_command(*arguments, timeout=timeout, variables=self.variables)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """`posttrain ARGUMENTS` in its own process group, reporting to these services."""
        return start_command(*arguments, variables=self.variables)

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """What Prefect's API answers; an error for a status above 399."""
        # Proxies of the environment must not see it.
        with httpx.Client(trust_env=False, timeout=30) as client:
            answer = client.request(method, f"{self.prefect_url}{path}", json=body)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def flow_run(self, identity: str, until: Collection[str], seconds: float = 120) -> Any:
        """The flow run once its state's type is one of `until`."""
        deadline = time.monotonic() + seconds
        while True:
            found = self.ask("GET", f"/flow_runs/{identity}")
            if found["state_type"] in until:
                return found
            assert time.monotonic() < deadline, (found["state"], self.log("worker")[-3000:])
            time.sleep(0.3)

    def log(self, service: str) -> str:
        """The log of a service so far."""
        return (self.home / "services" / "logs" / f"{service}.log").read_text()


def skip_unless_possible() -> None:
    """Skip the test where PostgreSQL or its driver is missing."""
    missing = why_missing()
    if missing is None and importlib.util.find_spec("psycopg2") is None:
        missing = "psycopg2 is not installed"
    if missing is not None:
        pytest.skip(missing)


@contextmanager
def temporary_home() -> Iterator[Path]:
    """A home that the user `postgres` can enter, which pytest's own folders forbid."""
    folder = Path(tempfile.mkdtemp(prefix="posttrain-services-"))
    folder.chmod(0o711)
    try:
        yield folder / "home"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def start(home: Path) -> Finished:
    """`posttrain services up` on free ports."""
    chosen = zip(("postgres", "prefect", "mlflow"), free_ports(3), strict=True)
    ports = [text for name, port in chosen for text in (f"--{name}-port", str(port))]
    return run_command("services", "up", "--home", str(home), *ports, "--json", variables=HASTE)


@contextmanager
def running_services() -> Iterator[Services]:
    """Bring everything up; afterwards take it down and see that no process is left."""
    skip_unless_possible()
    with temporary_home() as home:
        try:
            up = start(home)
            assert up.code == 0, up.text
            yield Services(home, up.result["PREFECT_API_URL"], up.result["MLFLOW_TRACKING_URI"])
        finally:
            down = run_command("services", "down", "--home", str(home))
        assert down.code == 0, down.text
        assert processes_of(home) == []


def processes_of(home: Path) -> list[str]:
    """Every process of the services of `home`, by environment or by command line."""
    found = {process.pid: process for process in marked(home / "services")}
    for process in psutil.process_iter(["cmdline"]):
        if str(home) in " ".join(process.info["cmdline"] or []):
            found[process.pid] = process
    return [repr(process) for process in found.values()]
