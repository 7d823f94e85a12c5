"""Prefect's settings for a home directory; must be applied before prefect is imported.

With `PREFECT_API_URL` set, runs report to that server. Otherwise a run has a server of its own on
localhost (`prefect_server`), on a SQLite file in the home.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from pathlib import Path

from pydantic import ValidationError

from posttrain.core.errors import ConfigError


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


def set_environment(home: Path) -> None:
    """Set the environment of a run; raises `ConfigError` for a variable that Prefect refuses."""
    os.environ.update(prefect_settings(home))
    check_settings()


def configure_prefect(home: Path) -> None:
    """Set the environment of a run, and make Prefect's folder."""
    set_environment(home)
    (home / "prefect").mkdir(parents=True, exist_ok=True)


def configure_client(home: Path) -> None:
    """As `configure_prefect`, for a command that only talks to a server; logs keep their levels."""
    folder = home / "prefect"
    os.environ["PREFECT_HOME"] = str(folder)
    os.environ.setdefault("DO_NOT_TRACK", "1")
    os.environ.setdefault("PREFECT_CLI_PROMPT", "false")
    check_settings()
    folder.mkdir(parents=True, exist_ok=True)


def check_settings() -> None:
    """Import Prefect; raises `ConfigError` for a variable of the environment that it refuses."""
    said = io.StringIO()  # Prefect prints what is wrong before it raises, in pydantic's words
    try:
        with contextlib.redirect_stderr(said), warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "Failed to create the Prefect home"
            )  # it is made if the run begins
            from prefect.settings import get_current_settings

            get_current_settings()
    except ValidationError as error:
        first = error.errors()[0]
        field, value = str(first["loc"][-1]).upper(), str(first["input"])
        names = [
            name
            for name, given in os.environ.items()
            if name.startswith("PREFECT_")
            and name.endswith(field)
            and given.upper() == value.upper()
        ]
        raise ConfigError(
            f"{' or '.join(names) or field} is '{value}', which Prefect refuses: {first['msg']}; "
            "correct it or unset it"
        ) from error
    print(said.getvalue(), end="", file=sys.stderr)


def inside_a_flow_run() -> bool:
    """Whether a Prefect flow calls us, as a deployed one does: Prefect is then set up already."""
    context = sys.modules.get("prefect.context")
    return context is not None and context.FlowRunContext.get() is not None
