"""Chat requests to an OpenAI-compatible endpoint, that end in a reply or in what went wrong."""

from __future__ import annotations

import asyncio
import json
import os
import random
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import httpx

from posttrain.core.errors import ResourceError, RunError
from posttrain.core.judging.limits import Budget, Pace
from posttrain.core.types import ScoreStatus

MAX_REPLY_BYTES = 1 << 20
LONGEST_WAIT = 30.0
Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Reply:
    """The text of a reply, or None with what went wrong."""

    text: str | None
    status: ScoreStatus = "ok"
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a judge is, and how patient one is with it. `timeout` is seconds for one attempt."""

    base_url: str
    model: str
    api_key_env: str | None = None
    timeout: float = 60.0
    max_retries: int = 4
    backoff: float = 1.0
    parameters: Mapping[str, object] = field(default_factory=dict)


class _TryAgain(Exception):
    """The attempt failed in a way that may pass; `wait` is what the server asks for, if it does."""

    def __init__(self, why: str, wait: float | None = None) -> None:
        super().__init__(why)
        self.wait = wait


class ChatClient:
    """Sends chats to one endpoint, so many at a time. Use it inside one event loop, as a context.

    Statuses 408, 425, 429 and 5xx and broken connections are tried again, with twice the wait each
    time (or what the server asks for, up to 30 s); an attempt that takes too long is not. Every
    attempt counts against the budget. 401, 403 and 404 are the configuration's fault and raise
    `RunError`. No redirect is followed, and the key is in no message.
    """

    def __init__(self, endpoint: Endpoint, budget: Budget, pace: Pace, concurrency: int) -> None:
        self.endpoint, self.budget, self.pace = endpoint, budget, pace
        self.slots = asyncio.Semaphore(concurrency)
        self.key = api_key(endpoint.api_key_env)
        # Settings of a proxy are for hosts elsewhere.
        url = urlsplit(endpoint.base_url)
        self.http = httpx.AsyncClient(
            verify=certificates() if url.scheme == "https" else False,  # http has none to verify
            trust_env=url.hostname not in ("127.0.0.1", "localhost", "::1"),
            timeout=endpoint.timeout,
            limits=httpx.Limits(max_connections=concurrency),
            headers={"Authorization": f"Bearer {self.key}"} if self.key else {},
        )

    async def __aenter__(self) -> ChatClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    async def ask(self, messages: Sequence[Message], **parameters: object) -> Reply:
        body: dict[str, object] = {"model": self.endpoint.model, "messages": list(messages)}
        body |= {**self.endpoint.parameters, **parameters}
        async with self.slots:
            for attempt in range(self.endpoint.max_retries + 1):
                await self.pace.wait()
                if (spent := self.budget.take()) is not None:
                    return Reply(None, "error", spent)
                try:
                    async with asyncio.timeout(self.endpoint.timeout):
                        return await self._attempt(body)
                except TimeoutError:
                    return Reply(None, "timeout", f"no reply in {self.endpoint.timeout:g} s")
                except _TryAgain as failure:
                    why, wait = str(failure), failure.wait
                if attempt < self.endpoint.max_retries:
                    await asyncio.sleep(self._wait(attempt, wait))
        return Reply(None, "error", f"gave up after {attempt + 1} attempts: {why}")

    def _wait(self, attempt: int, asked: float | None) -> float:
        jitter = random.uniform(0.5, 1.0)  # so that those who failed together do not return so
        wait = self.endpoint.backoff * 2**attempt * jitter if asked is None else asked
        return min(wait, LONGEST_WAIT)

    async def _attempt(self, body: Mapping[str, object]) -> Reply:
        url = f"{self.endpoint.base_url.rstrip('/')}/chat/completions"
        try:
            async with self.http.stream("POST", url, json=body) as response:
                content = await _read(response)
        except httpx.TimeoutException as error:
            raise TimeoutError from error
        except httpx.RequestError as error:
            raise _TryAgain(self._safe(f"{type(error).__name__}: {error}")) from error
        code = response.status_code
        said = self._safe(content[:200].decode("utf-8", "replace"))
        if code in (401, 403, 404):
            raise RunError(
                f"the judge at {self.endpoint.base_url} refuses: HTTP {code}, {said!r}: check "
                f"base_url, model ('{self.endpoint.model}') and the key in "
                f"{self.endpoint.api_key_env or 'api_key_env (none is named)'}"
            )
        if code in (408, 425, 429) or code >= 500:
            raise _TryAgain(f"HTTP {code}: {said}", _seconds(response.headers.get("retry-after")))
        if code != 200:
            return Reply(None, "error", f"HTTP {code}: {said}")
        return self._read_reply(content)

    def _read_reply(self, content: bytes) -> Reply:
        try:
            answer = json.loads(content)
            text = answer["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError):
            text = answer = None
        if not isinstance(text, str):
            said = self._safe(content[:200].decode("utf-8", "replace"))
            return Reply(None, "error", f"not a chat completion: {said!r}")
        self.budget.spend(_tokens(answer, content))
        return Reply(text)

    def _safe(self, text: str) -> str:
        return text.replace(self.key, "***") if self.key else text


@cache
def certificates() -> ssl.SSLContext:
    """Which servers are trusted; read once, since that takes as long as many requests."""
    return httpx.create_ssl_context()


def api_key(variable: str | None) -> str | None:
    """The key in the environment variable of that name; None if none is named."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ResourceError(
            f"the environment variable '{variable}', which holds the judge's key, is not set: "
            "export it, or set api_key_env to null for an endpoint without keys"
        )
    if not (key.isascii() and key.isprintable()):
        raise ResourceError(
            f"the key in the environment variable '{variable}' has characters that no HTTP header "
            "may hold: export it again"
        )
    return key


async def _read(response: httpx.Response) -> bytes:
    content = b""
    async for chunk in response.aiter_bytes():
        content += chunk
        if len(content) > MAX_REPLY_BYTES:
            raise _TryAgain(f"a reply longer than {MAX_REPLY_BYTES} bytes")
    return content


def _seconds(header: str | None) -> float | None:
    try:
        seconds = float(header or "")
    except ValueError:
        return None  # absent, or a date
    return seconds if 0 <= seconds < float("inf") else None


def _tokens(answer: Any, content: bytes) -> int:  # Any: JSON
    """Tokens that a reply says were used; a quarter of its bytes where it says nothing."""
    usage = answer.get("usage") if isinstance(answer, dict) else None
    total = usage.get("total_tokens") if isinstance(usage, dict) else None
    return total if isinstance(total, int) and total >= 0 else -(-len(content) // 4)
