"""A real Prefect server that the runs of many tests report to.

Without one, each run starts a server of its own, which takes as much processor time as half of the
run's own start. Tests of that server, of its database and of kills keep it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from posttrain.core.runtime.processes import free_ports
from tests.helpers.pipeline import environment, prepared


@contextmanager
def running_prefect(folder: Path) -> Iterator[str]:
    """The address of the API of a server with its data in `folder`."""
    (port,) = free_ports(1)
    home = prepared(folder) / "prefect"
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "prefect", "server", "start", "--port", str(port), "--no-ui"],
            env=environment() | {"PREFECT_HOME": str(home), "DO_NOT_TRACK": "1"},
            stdout=log,
            stderr=log,
        )
    url, ends = f"http://127.0.0.1:{port}/api", time.monotonic() + 120
    try:
        while not _answers(url):
            assert server.poll() is None and time.monotonic() < ends, folder / "server.log"
            time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        server.wait(30)


def _answers(url: str) -> bool:
    try:
        with httpx.Client(trust_env=False) as client:
            return client.get(f"{url}/health").is_success
    except httpx.TransportError:
        return False
