"""Where the services of a home keep their state, where they listen, and whether they answer."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from http import HTTPStatus
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from posttrain.core.errors import ResourceError
from posttrain.core.runtime.files import WrongContent, read_json, write_text
from posttrain.core.store.locks import locked

HOST = "127.0.0.1"
POOL = "posttrain"
"""The work pool of the worker."""


@dataclass(frozen=True, slots=True)
class Ports:
    postgres: int = 5433
    prefect: int = 4200
    mlflow: int = 5000


class _Ports(BaseModel):
    model_config = ConfigDict(extra="forbid")

    postgres: int
    prefect: int
    mlflow: int


@dataclass(frozen=True, slots=True)
class Layout:
    home: Path

    @property
    def folder(self) -> Path:
        return self.home / "services"

    @property
    def password_file(self) -> Path:
        """The database's password in PostgreSQL's own format, readable by its owner only."""
        return self.folder / "pgpass"

    def log(self, service: str) -> Path:
        return self.folder / "logs" / f"{service}.log"

    def record(self, service: str) -> Path:
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
        path = self.folder / "ports.json"
        if not path.exists():
            return None
        try:
            return Ports(**read_json(path, _Ports))
        except WrongContent as error:
            raise ResourceError(
                f"{path} does not hold the ports of this home's services ({error}): remove it, "
                "and `posttrain services up` writes it again"
            ) from error

    def keep_ports(self, ports: Ports) -> None:
        write_text(self.folder / "ports.json", json.dumps(asdict(ports)))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One `up` or `down` at a time; another one waits."""
        self.prepare()
        with locked(self.folder / ".lock"):
            yield


def exports(ports: Ports) -> dict[str, str]:
    return {
        "PREFECT_API_URL": f"http://{HOST}:{ports.prefect}/api",
        "MLFLOW_TRACKING_URI": f"http://{HOST}:{ports.mlflow}",
    }


def plain_environment() -> Mapping[str, str]:
    """The caller's environment without what it says of other servers."""
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
    import httpx  # it takes a tenth of a second

    try:
        # Proxies of the environment must not see requests to this machine.
        return httpx.get(url, timeout=5, trust_env=False).status_code == HTTPStatus.OK
    except httpx.HTTPError:
        return False
