"""Prefect's own server as a process that cannot outlive this one; imports Prefect."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import prefect
from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import get_current_settings

from posttrain.core.serving import guard

FLUSH_INTERVAL = "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL"
"""Seconds in which events are stored: 5 by Prefect's default, and a run waits for its last."""


class _Guarded(subprocess.Popen[Any]):
    """A guard with its server, which ends when its standard input does."""

    def terminate(self) -> None:
        """Let the server end as it does after SIGTERM."""
        assert self.stdin is not None
        self.stdin.close()


class GuardedServer(SubprocessASGIServer):
    """The server that Prefect's client finds in its place, as they are kept by port.

    Prefect stops its own in an exit function, which a killed process does not run; the server would
    stay for ever.
    """

    def _run_uvicorn_command(self) -> subprocess.Popen[Any]:
        """Prefect's own command, under the guard."""
        folder = str(prefect.__module_path__.parent)
        app = ("--app-dir", folder, "--factory", "prefect.server.api.server:create_app")
        place = ("--host", "127.0.0.1", "--port", str(self.port))
        command = (sys.executable, "-m", "uvicorn", *app, *place, "--log-level", "error")
        ours = {"PREFECT_UI_ENABLED": "0", FLUSH_INTERVAL: "0.5"} | {
            f"PREFECT__SERVER_{name}": "1" for name in ("EPHEMERAL", "FINAL")
        }
        settings = get_current_settings().to_environment_variables(exclude_unset=True)
        return _Guarded(
            (sys.executable, guard.__file__, *command, "--lifespan", "on"),
            stdin=subprocess.PIPE,
            env=os.environ | ours | settings,
        )
