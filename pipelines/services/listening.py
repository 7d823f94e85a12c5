"""The address that servers of this machine listen on, free ports, and whether a server answers."""

from __future__ import annotations

import socket
from http import HTTPStatus

from posttrain.core.errors import ResourceError

HOST = "127.0.0.1"


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
    import httpx  # it takes a tenth of a second

    try:
        # Proxies of the environment must not see requests to this machine.
        return httpx.get(url, timeout=5, trust_env=False).status_code == HTTPStatus.OK
    except httpx.HTTPError:
        return False
