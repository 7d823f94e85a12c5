"""Prefect's settings for a home directory; must be applied before prefect is imported.

With `PREFECT_API_URL` set, runs report to that server. Otherwise Prefect starts its own API on
localhost for the length of the run, on a SQLite file in the home.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def configure_prefect(home: Path) -> None:
    """Set the environment; what the user has set already wins."""
    folder = home / "prefect"
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["PREFECT_HOME"] = str(folder)
    defaults = {
        # The first start migrates an empty database, which takes 10 to 17 s on two cores.
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        # A failed stage is told in one sentence by the command itself, without Prefect's traceback.
        "PREFECT_LOGGING_LEVEL": "CRITICAL",
        "PREFECT_LOGGING_SERVER_LEVEL": "CRITICAL",
        "PREFECT_CLI_PROMPT": "false",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def configure_client(home: Path) -> None:
    """Set the environment of a command that only talks to a server; logs keep their levels."""
    folder = home / "prefect"
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["PREFECT_HOME"] = str(folder)
    os.environ.setdefault("DO_NOT_TRACK", "1")
    os.environ.setdefault("PREFECT_CLI_PROMPT", "false")


def inside_a_flow_run() -> bool:
    """Whether a Prefect flow calls us, as a deployed one does: Prefect is then set up already."""
    context = sys.modules.get("prefect.context")
    return context is not None and context.FlowRunContext.get() is not None
