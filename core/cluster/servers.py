"""A server that an engine asks: by HTTP from here, or on a node of a cluster.

What is above knows a `Server` alone. Its requests are those of HTTP, however they travel.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from posttrain.core.cluster.shared import SharedFiles
from posttrain.core.runtime.http_client import Json, Reply, ask
from posttrain.core.runtime.processes import ServerProcess, free_ports

if TYPE_CHECKING:
    import aiohttp

LOOPBACK = "127.0.0.1"
CONNECT_S = 5.0
"""For the connection to one of our own servers, of the time of a request."""


@dataclass(frozen=True, slots=True)
class SentFiles:
    """Files on their way to servers, with one digest over all of them.

    They are in a folder that the servers see, or in the memory of their cluster.
    """

    digest: str
    folder: Path | None = None
    shared: SharedFiles | None = None


class Server(Protocol):
    """One server, wherever it runs."""

    name: str
    """What messages call it."""
    is_ours: bool
    """Whether the run started it, and ends it."""

    async def ask(self, path: str, body: Json | None = None, limit_s: float | None = None) -> Reply:
        """The answer to a POST of `body`, or to a GET without one; `limit_s` if not the usual time.

        Raises `Unreachable` where there is none.
        """

    async def has_ended(self) -> bool:
        """Whether its process is known to be gone."""

    async def last_words(self) -> str:
        """How its process ended, and the end of its log; empty of one that is not ours."""

    async def receive(self, name: str, files: SentFiles) -> str:
        """A folder that it sees, with the files. Raises `RunError` where they do not get there."""

    async def forget(self, folder: str) -> None:
        """The folder that `receive` gave is not needed any more."""

    async def stop(self) -> None:
        """End it, if it is ours; may be called twice."""


def loopback_command(arguments: Sequence[str], port: int) -> list[str]:
    """The command of this Python with `arguments`, with the address to listen on: loopback only."""
    return [sys.executable, *arguments, "--host", LOOPBACK, "--port", str(port)]


class HttpServer:
    """A `Server` by its URL; `process` is that of one which the run started on this machine."""

    def __init__(
        self, url: str, client: aiohttp.ClientSession, process: ServerProcess | None = None
    ) -> None:
        self.name, self.process, self._client = url, process, client
        self.is_ours = process is not None

    @classmethod
    def started(
        cls, arguments: Sequence[str], env: dict[str, str], log: Path, client: aiohttp.ClientSession
    ) -> HttpServer:
        """One of this machine, on a free port."""
        (port,) = free_ports(1)
        process = ServerProcess(loopback_command(arguments, port), env, log)
        return cls(f"http://{LOOPBACK}:{port}", client, process)

    async def ask(self, path: str, body: Json | None = None, limit_s: float | None = None) -> Reply:
        """As in `Server`."""
        return await ask(self._client, f"{self.name}{path}", body, limit_s)

    async def has_ended(self) -> bool:
        """As in `Server`."""
        return self.process is not None and self.process.exit_code is not None

    async def last_words(self) -> str:
        """As in `Server`."""
        return "" if self.process is None else last_words(self.process)

    async def receive(self, name: str, files: SentFiles) -> str:
        """As in `Server`."""
        assert files.folder is not None
        return str(files.folder)

    async def forget(self, folder: str) -> None:
        """As in `Server`; whoever wrote the folder removes it."""

    async def stop(self) -> None:
        """As in `Server`."""
        if self.process is not None:
            await asyncio.to_thread(self.process.stop)


def last_words(process: ServerProcess) -> str:
    """How it ended, and the end of its log."""
    code = process.exit_code
    ended = "" if code is None else f"exit code {code}; "
    return f"{ended}last lines of {process.log}:\n{process.log_tail()}"
