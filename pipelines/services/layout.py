"""Where the services of a home keep their state, and on which ports they listen."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from posttrain.core.errors import ResourceError
from posttrain.core.runtime.files import WrongContent, read_json, write_text
from posttrain.core.store.locks import locked
from posttrain.pipelines.services.listening import HOST

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
