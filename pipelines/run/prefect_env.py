"""Prefect's settings for a home directory; must be applied before prefect is imported.

With `PREFECT_API_URL` set, runs report to that server. Otherwise a run has a server of its own on
localhost (`prefect_server`), on a SQLite file in the home.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def prefect_settings(home: Path) -> dict[str, str]:
    """The environment of a run and of its own server; what the user has set already wins."""
    defaults = {
        # A version of Prefect without a schema file migrates an empty database: 10 to 17 s.
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        # The command itself reports a failed stage in one sentence, without Prefect's traceback.
        "PREFECT_LOGGING_LEVEL": "CRITICAL",
        "PREFECT_LOGGING_SERVER_LEVEL": "CRITICAL",
        "PREFECT_CLI_PROMPT": "false",
        # Waits of 2 and 4 s for a server that is away. The end of a flow asks three times.
        "PREFECT_CLIENT_MAX_RETRIES": "2",
        # Prefect's own 60 s, three times, is more than the end of a run may take.
        "PREFECT_API_REQUEST_TIMEOUT": "8",
        # Else each event that such a server does not take is an error of ten lines.
        "PREFECT_LOGGING_INTERNAL_LEVEL": "CRITICAL",
    }
    chosen = {name: os.environ.get(name, value) for name, value in defaults.items()}
    return {"PREFECT_HOME": str(home / "prefect"), **chosen}


def configure_prefect(home: Path) -> None:
    """Set the environment of a run, and make Prefect's folder."""
    (home / "prefect").mkdir(parents=True, exist_ok=True)
    os.environ.update(prefect_settings(home))


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
