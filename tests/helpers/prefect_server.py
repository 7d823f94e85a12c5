"""A real Prefect server that the runs of many tests report to.

Without one, each run starts a server of its own, which takes as much processor time as half of the
run's own start. Tests of that server, of its database and of kills keep it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from posttrain.core.runtime.processes import ServerProcess, free_ports
from tests.helpers.pipeline import environment, prepared


@contextmanager
def running_prefect(folder: Path) -> Iterator[str]:
    """The address of the API of a server with its data in `folder`."""
    (port,) = free_ports(1)
    home = prepared(folder) / "prefect"
    server = ServerProcess(  # it ends with this process, also with one that is killed
        [sys.executable, "-m", "prefect", "server", "start", "--port", str(port), "--no-ui"],
        environment() | {"PREFECT_HOME": str(home), "DO_NOT_TRACK": "1"},
        folder / "server.log",
    )
    url, ends = f"http://127.0.0.1:{port}/api", time.monotonic() + 120
    try:
        while not _answers(url):
            assert server.exit_code is None and time.monotonic() < ends, server.log_tail()
            time.sleep(0.2)
        yield url
    finally:
        server.stop()


def _answers(url: str) -> bool:
    try:
        with httpx.Client(trust_env=False) as client:
            return client.get(f"{url}/health").is_success
    except httpx.TransportError:
        return False
