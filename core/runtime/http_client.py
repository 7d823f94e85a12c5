"""Requests to servers of models, to judges and to teachers, hundreds of them in flight.

Not by httpx: for each request it asks every open connection whether it still is.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from posttrain.core.errors import RunError

if TYPE_CHECKING:  # 0.1 s, for which commands that ask no server do not wait
    import aiohttp

Json = dict[str, Any]  # Any: JSON
KEPT_S = 2.0
"""How long a connection waits for its next request: less than servers keep it open."""


class Unreachable(RunError):
    """A server gave no answer."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a server answered."""

    status: int
    text: str


async def make_client(
    timeout_s: float,
    connections: int,
    *,
    connect_s: float | None = None,
    url: str = "",
    key: str = "",
) -> aiohttp.ClientSession:
    """A client for `connections` requests at once, in the loop that uses it.

    A request has `timeout_s`, of which connecting has `connect_s`. All go to the host of `url`,
    with `key` as a bearer's; without a `url` to hosts for which no proxy is used.
    """
    import aiohttp

    https = urlsplit(url).scheme == "https"
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(timeout_s, sock_connect=connect_s),
        connector=aiohttp.TCPConnector(
            limit=connections,
            keepalive_timeout=KEPT_S,
            ssl=certificates() if https else True,
        ),
        headers={"Authorization": f"Bearer {key}"} if key else {},
        proxy=proxy_for(url),
    )


async def ask(
    client: aiohttp.ClientSession, url: str, body: Json | None, limit_s: float | None = None
) -> Reply:
    """The answer to a POST of `body`, or to a GET without one; `limit_s` if not the usual time.

    Does not follow redirects. Raises `Unreachable` if the server does not answer.
    """
    import aiohttp

    timeout = client.timeout if limit_s is None else aiohttp.ClientTimeout(limit_s)
    method = "GET" if body is None else "POST"
    request = client.request(method, url, json=body, timeout=timeout, allow_redirects=False)
    try:
        async with request as answer:
            return Reply(answer.status, await answer.text(errors="replace"))
    except aiohttp.ClientError as error:
        raise Unreachable(f"{type(error).__name__} {error}".strip()) from error
    except TimeoutError as error:
        raise Unreachable(f"no answer within {timeout.total:g} s") from error


def proxy_for(url: str) -> str | None:
    """The proxy that the environment names for `url`; none for this machine.

    Not by aiohttp's `trust_env`, with which a line of ~/.netrc would replace the key.
    """
    parts = urlsplit(url)
    if parts.hostname in ("127.0.0.1", "localhost", "::1", None) or proxy_bypass(parts.hostname):
        return None
    proxies = getproxies()
    return proxies.get(parts.scheme) or proxies.get("all")


@cache
def certificates() -> ssl.SSLContext:
    """Which servers are trusted; read once, since that takes as long as many requests."""
    import httpx

    return httpx.create_ssl_context()
