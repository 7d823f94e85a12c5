"""A real Prefect server that the runs of many tests report to.

Without one, each run starts a server of its own, which takes as much processor time as half of the
run's own start. Tests of that server, of its database and of kills keep it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from posttrain.pipelines.run.prefect_env import prefect_settings
from tests.helpers.pipeline import environment


@contextmanager
def running_prefect(home: Path) -> Iterator[str]:
    """The address of the API of a server with its data in `home`.

    The program is that of a run's own server: it ends with its standard input, so with this
    process. `prefect server start` loads Prefect twice.
    """
    (home / "prefect").mkdir()
    server = subprocess.Popen(
        [sys.executable, "-m", "posttrain.pipelines.run.prefect_program"],
        env=environment() | prefect_settings(home) | {"PREFECT_UI_ENABLED": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with server:
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(b"begin\n")
        server.stdin.flush()
        port = server.stdout.readline().strip().decode()
        assert port, f"exit code {server.wait()}, see what it printed"
        yield f"http://127.0.0.1:{port}/api"
        server.stdin.close()
