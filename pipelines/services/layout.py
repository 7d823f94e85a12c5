"""Where the services of a home keep their state, where they listen, and whether they answer."""

from __future__ import annotations

import json
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from posttrain.core.errors import ResourceError
from posttrain.core.locks import locked

HOST = "127.0.0.1"
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens URLs of this machine, which the environment's proxies must not see."""
POOL = "posttrain"
"""The work pool of the worker."""


@dataclass(frozen=True, slots=True)
class Ports:
    """TCP ports on 127.0.0.1."""

    postgres: int = 5433
    prefect: int = 4200
    mlflow: int = 5000


@dataclass(frozen=True, slots=True)
class Layout:
    """The files of the services of one home."""

    home: Path

    @property
    def folder(self) -> Path:
        """All state and logs."""
        return self.home / "services"

    @property
    def password_file(self) -> Path:
        """The database's password in PostgreSQL's own format, readable by its owner only."""
        return self.folder / "pgpass"

    def log(self, service: str) -> Path:
        """The log of a service; each start begins it anew."""
        return self.folder / "logs" / f"{service}.log"

    def record(self, service: str) -> Path:
        """Which process runs the service."""
        return self.folder / "running" / f"{service}.json"

    def prepare(self) -> None:
        """Make the folders. Raises `ResourceError` where they cannot be made."""
        try:
            for folder in (self.folder / "logs", self.folder / "running"):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ResourceError(
                f"cannot create {error.filename or self.folder}: {error.strerror}; choose another "
                "--home"
            ) from error

    def ports(self) -> Ports | None:
        """The ports of the last `up`, or None before the first."""
        path = self.folder / "ports.json"
        try:
            return Ports(**json.loads(path.read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise ResourceError(f"{path} cannot be read ({error}): remove it") from error

    def keep_ports(self, ports: Ports) -> None:
        """Use `ports` from now on."""
        partial = self.folder / ".ports.json"
        partial.write_text(json.dumps(asdict(ports)))
        partial.replace(self.folder / "ports.json")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One `up` or `down` at a time; another one waits."""
        self.prepare()
        with locked(self.folder / ".lock"):
            yield


def exports(ports: Ports) -> dict[str, str]:
    """The variables by which commands report to these servers."""
    return {
        "PREFECT_API_URL": f"http://{HOST}:{ports.prefect}/api",
        "MLFLOW_TRACKING_URI": f"http://{HOST}:{ports.mlflow}",
    }


def plain_environment() -> Mapping[str, str]:
    """The caller's environment without what it says of other servers.

    How often workers ask for work stays the caller's choice.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PREFECT_", "MLFLOW_", "PG")) or name.startswith("PREFECT_WORKER_")
    }


def check_port(port: int, option: str, name: str) -> None:
    """Raise `ResourceError` naming the port and the option when something listens on it."""
    with socket.socket() as probe:
        # As servers do: a port that only waits for its last connection to time out is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ResourceError(
                f"port {port} for {name} cannot be used on {HOST} ({error.strerror}): stop what "
                f"listens there, or choose another port with {option}"
            ) from error


def answers(url: str) -> bool:
    """Whether a GET of `url` ends in status 200."""
    try:
        with OPENER.open(url, timeout=5) as response:
            return int(response.status) == 200
    except (urllib.error.URLError, OSError):
        return False
