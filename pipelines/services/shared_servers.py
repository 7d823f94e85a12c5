"""Whether the servers of a run can serve several processes at once. SQLite cannot."""

from __future__ import annotations

import base64
import os
import urllib.parse
from pathlib import Path

import httpx
import psutil

from posttrain.core.errors import ResourceError

FIX = "`posttrain services up` starts servers on PostgreSQL and prints what to export"
TIMEOUT_S = 10.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def require_shared_prefect() -> str:
    """The address of Prefect's API; `ResourceError` unless it can serve several processes."""
    url = os.environ.get("PREFECT_API_URL", "").rstrip("/")
    if not url:
        raise ResourceError(
            f"deployments need a Prefect server, and PREFECT_API_URL is empty: {FIX}"
        )
    if _is_sqlite(url):
        raise ResourceError(
            f"the Prefect server at {url} keeps its data in SQLite, which several processes cannot "
            f"share: start it on PostgreSQL; {FIX}"
        )
    return url


def require_shared_mlflow() -> str:
    """The tracking URI. Raises `ResourceError` unless it can serve several processes."""
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    if not uri or uri.startswith(("sqlite:", "file:", "/", ".")):
        found = f"MLFLOW_TRACKING_URI is {uri}" if uri else "MLFLOW_TRACKING_URI is empty"
        raise ResourceError(
            "deployed runs need an MLflow server, as several processes cannot share SQLite or a "
            f"folder, but {found}: {FIX}"
        )
    return uri


def api_headers() -> dict[str, str]:
    """What Prefect's own client sends, so that a server with a key, or a proxy, lets it in."""
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    found = dict(settings.client.custom_headers)
    if settings.api.auth_string is not None:
        login = base64.b64encode(settings.api.auth_string.get_secret_value().encode())
        found["Authorization"] = f"Basic {login.decode()}"
    elif settings.api.key is not None:
        found["Authorization"] = f"Bearer {settings.api.key.get_secret_value()}"
    return found


def _settings(url: str) -> object:
    try:
        answer = httpx.get(f"{url}/admin/settings", headers=api_headers(), timeout=TIMEOUT_S)
        return answer.raise_for_status().json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ResourceError(
            f"the Prefect server at PREFECT_API_URL={url} does not answer ({error}): {FIX}"
        ) from error


def _is_sqlite(url: str) -> bool:
    """By the server's driver where it names one, else by the files of a server of this machine."""
    try:
        driver = _settings(url)["server"]["database"]["driver"]  # type: ignore[index]
    except (KeyError, TypeError):
        driver = None
    if driver is not None:
        return "sqlite" in str(driver)
    parts = urllib.parse.urlsplit(url)
    return parts.hostname in LOOPBACK and any(
        Path(path).suffix in (".db", ".sqlite") for path in _open_files(parts.port or 80)
    )


def _open_files(port: int) -> list[str]:
    """Files that the processes listening on a local port hold open, as far as they can be seen."""
    found = []
    for process in psutil.process_iter():
        try:
            sockets = process.net_connections("tcp")
            if any(s.status == psutil.CONN_LISTEN and s.laddr.port == port for s in sockets):
                found += [file.path for file in process.open_files()]
        except psutil.Error:
            continue  # another user's, or gone
    return found
