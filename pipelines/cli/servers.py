"""A server as a child process: started, waited for, stopped with everything it started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.core.errors import ResourceError

HOST = "127.0.0.1"
STOP_SECONDS = 5.0

# Proxies of the environment must not see requests to this machine.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


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
        with _OPENER.open(url, timeout=5) as response:
            return int(response.status) == 200
    except (urllib.error.URLError, OSError):
        return False


class Server:
    """A running server in a process group of its own."""

    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        with spec.log.open("w") as log:
            self._process = subprocess.Popen(
                spec.command,
                env=dict(spec.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Its own session: Ctrl-C reaches only us, and we stop its whole group.
                start_new_session=True,
            )

    def wait_until_ready(self, seconds: float) -> None:
        """Return once every health URL answers 200; `ResourceError` with the log's end if not."""
        deadline = time.monotonic() + seconds
        waiting = list(self.spec.health)
        while waiting:
            if not self.is_running():
                self._fail(f"stopped with exit code {self._process.returncode}")
            if answers(waiting[0]):
                waiting.pop(0)
            elif time.monotonic() > deadline:
                self._fail(f"did not answer at {waiting[0]} within {seconds:.0f} s")
            else:
                time.sleep(0.2)

    def _fail(self, what: str) -> None:
        lines = self.spec.log.read_text(errors="replace").strip().splitlines()
        last = lines[-1].strip() if lines else "nothing"
        raise ResourceError(
            f"the {self.spec.name} server {what}; its log {self.spec.log} ends with: {last}"
        )

    def is_running(self) -> bool:
        """Whether the process is alive."""
        return self._process.poll() is None

    def ask_to_stop(self) -> None:
        """Send SIGTERM to the whole group."""
        self._signal(signal.SIGTERM)

    def finish(self, deadline: float) -> None:
        """Wait until `deadline` (monotonic seconds), then kill what is left of the group."""
        try:
            self._process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            pass  # all of it has ended


def stop_all(servers: Sequence[Server]) -> None:
    """Stop all servers at once; returns within `STOP_SECONDS` and a moment."""
    deadline = time.monotonic() + STOP_SECONDS
    for server in servers:
        server.ask_to_stop()
    for server in servers:
        server.finish(deadline)
