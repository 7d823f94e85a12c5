"""A session with a server of the Model Context Protocol: a program of ours, or an address.

The connection lives in a task of its own: the client library cancels the task that opened it when
the other side is gone, and none of ours shall be cancelled for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, model_validator

from posttrain.core.contracts import PluginConfig, ToolResult
from posttrain.core.errors import ResourceError
from posttrain.core.redaction import names_a_secret, redacted
from posttrain.core.rollout.external import VariableName, variable
from posttrain.core.rollout.plays import described, first_of

INHERITED = ("HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER")
"""Variables of ours that a server's program gets; others are named."""
CLOSED, TIMED_OUT = -32000, -32001
"""Codes of errors that the client itself raises."""
PATIENCE_S = 2.0
"""How long a server may take to end by itself, and after each signal."""
MOST_PAGES = 100
STDERR_BYTES = 2000
OMITTED = "[{kind} omitted]"


class McpServer(PluginConfig):
    """One server: the command of a program, or an address."""

    command: tuple[str, ...] = Field(default=(), description="a program that speaks on its stdio")
    env: dict[VariableName, str] = Field(
        default={}, description="variables that the program gets; no keys"
    )
    pass_env: tuple[VariableName, ...] = Field(
        default=(), description="variables of the run that the program gets, such as API keys"
    )
    url: str | None = Field(default=None, description="as http://127.0.0.1:8000/mcp")
    headers_env: dict[str, VariableName] = Field(
        default={}, description="header -> NAME of the environment variable with its value"
    )

    @model_validator(mode="after")
    def _is_one(self) -> McpServer:
        if bool(self.command) == bool(self.url):
            raise ValueError("a server has either a command or a url")
        for name in self.env:
            if names_a_secret(name):
                raise ValueError(f"a config is logged: export {name}, and name it in pass_env")
        if self.url is None:
            return self
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("expected a URL like http://127.0.0.1:8000/mcp")
        if parts.username or parts.password or parts.query:
            raise ValueError("a URL is logged, so it holds no key: name a variable in headers_env")
        return self

    def __str__(self) -> str:
        return self.url or " ".join(self.command)


class McpSession:
    """An open session. Used by one event loop; `call` may be awaited several times at once."""

    def __init__(self, server: McpServer, timeout_s: float, max_bytes: int) -> None:
        self.server, self.timeout_s, self.max_bytes = server, timeout_s, max_bytes
        self._over = asyncio.Event()
        self._stderr = bytearray()
        self._why = ""
        self._client: Any = None  # Any: the library is imported late
        self._task: asyncio.Task[None] | None = None

    async def open(self, limit_s: float) -> list[Any]:  # Any: tools of the library
        """Connect within `limit_s`, and list the tools; `ResourceError` where that fails."""
        opened = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(opened))
        try:
            await asyncio.wait({self._task, opened}, timeout=limit_s, return_when="FIRST_COMPLETED")
            if not opened.done():
                late = f"gave no answer within {limit_s:g} s"
                raise ResourceError(
                    self._lost("cannot be reached" if self._task.done() else late)
                    + "; correct the server's command or url, or start it"
                )
            self._client = opened.result()
            async with asyncio.timeout(limit_s):
                return await self._tools()
        except BaseException as error:
            await self.close()
            if isinstance(error, Exception) and not isinstance(error, ResourceError):
                raise ResourceError(self._lost(f"lists no tools ({error})")) from error
            raise

    async def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[ToolResult, int]:
        """The tool's answer, and how many parts of it were no text.

        What the tool or the server refuses, and an answer that is late or no result, is a failed
        result. Raises `ConnectionError` when the server is gone.
        """
        from mcp import MCPError

        assert self._task is not None
        asked = asyncio.ensure_future(
            self._client.call_tool(name, dict(arguments), read_timeout_seconds=self.timeout_s)
        )
        try:
            await asyncio.wait({asked, self._task}, return_when="FIRST_COMPLETED")
            if not asked.done():
                raise ConnectionError(self._lost("ended during a call"))
            return _result(asked.result())
        except MCPError as error:
            if error.code == TIMED_OUT:
                text = f"error: no answer within {self.timeout_s:g} seconds"
                return ToolResult(text, failed=True), 0
            if error.code == CLOSED:
                raise ConnectionError(self._lost("ended during a call")) from error
            return ToolResult(f"error: {error.message}", failed=True), 0
        except ValidationError:
            return ToolResult("error: the tool's result could not be read", failed=True), 0
        except asyncio.CancelledError as error:
            if asked.done() and self._task.done():  # not the caller was cancelled
                raise ConnectionError(self._lost("ended during a call")) from error
            raise
        finally:
            asked.cancel()

    async def close(self) -> None:
        """End the session and, of a command, the program with all that it started."""
        self._over.set()
        if self._task is None:
            return
        # What has not connected yet does not look at `_over`.
        patience = 5 * PATIENCE_S if self._client is not None else 0.0
        done, _ = await asyncio.wait({self._task}, timeout=patience)
        if not done:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=5 * PATIENCE_S)

    async def _hold(self, opened: asyncio.Future[Any]) -> None:
        from mcp import Client

        transport = self._http() if self.server.url else self._stdio()
        try:
            async with Client(transport, cache=None) as client:
                opened.set_result(client)
                await self._over.wait()
        except (Exception, asyncio.CancelledError) as error:
            # What the library raises when the other side is gone, which callers see by themselves.
            self._why = self._why or _reason(error)

    async def _tools(self) -> list[Any]:
        tools: list[Any] = []
        cursor = None
        for _ in range(MOST_PAGES):
            page = await self._client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                break
        return tools

    def _lost(self, what: str) -> str:
        said = bytes(self._stderr).decode("utf-8", "replace").strip()
        last = said.splitlines()[-1][:300] if said else ""
        why = "; ".join(part for part in (self._why, last) if part)
        sentence = f"the MCP server '{self.server}' {what}{f': {why}' if why else ''}"
        return redacted(sentence)

    @contextlib.asynccontextmanager
    async def _http(self) -> AsyncIterator[Any]:
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        session, most = self, self.max_bytes

        class Cut(httpx2.AsyncByteStream):  # type: ignore[misc]
            """A body of at most so many bytes."""

            def __init__(self, body: Any) -> None:
                self.body = body

            async def __aiter__(self) -> AsyncIterator[bytes]:
                size = 0
                async for part in self.body:
                    size += len(part)
                    if size > most:
                        session._why = f"an answer passed {most} bytes (max_result_bytes)"
                        raise httpx2.ReadError(session._why)
                    yield part

            async def aclose(self) -> None:
                await self.body.aclose()

        class Limited(httpx2.AsyncHTTPTransport):  # type: ignore[misc]
            """Streams of events have a limit for each event, by the library."""

            async def handle_async_request(self, request: Any) -> Any:
                response = await super().handle_async_request(request)
                if "text/event-stream" not in response.headers.get("content-type", ""):
                    response.stream = Cut(response.stream)
                return response

        url = str(self.server.url)
        headers = {
            name: variable(value, f"the header {name} of {url}")
            for name, value in self.server.headers_env.items()
        }
        # A certificate is checked where there is one, and reading them all takes a while.
        transport = Limited(verify=url.startswith("https:"))
        timeout = httpx2.Timeout(self.timeout_s, read=None)
        async with httpx2.AsyncClient(
            transport=transport, headers=headers, timeout=timeout
        ) as client:
            opened = streamable_http_client(url, http_client=client, max_sse_event_size=most)
            async with opened as streams:
                yield streams

    @contextlib.asynccontextmanager
    async def _stdio(self) -> AsyncIterator[Any]:
        """The streams of a program's messages, a line each. The library's own transport reads long
        lines in quadratic time and without a limit."""
        import anyio
        from mcp.shared.message import SessionMessage
        from mcp_types import jsonrpc_message_adapter

        env = {name: os.environ[name] for name in INHERITED if name in os.environ}
        env |= self.server.env
        for name in self.server.pass_env:
            env[name] = variable(name, f"the MCP server '{self.server}'")
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *self.server.command,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env=env,
            limit=self.max_bytes,
            start_new_session=True,
        )
        assert process.stdin and process.stdout and process.stderr
        to_client, incoming = anyio.create_memory_object_stream[Any](0)
        outgoing, from_client = anyio.create_memory_object_stream[Any](0)
        stdin, stdout, stderr = process.stdin, process.stdout, process.stderr

        async def reads() -> None:
            async with to_client:
                while True:
                    try:
                        line = await stdout.readuntil(b"\n")
                    except asyncio.IncompleteReadError:
                        return
                    except asyncio.LimitOverrunError:
                        self._why = f"a line passed {self.max_bytes} bytes (max_result_bytes)"
                        _signal(process, signal.SIGKILL)
                        return
                    try:
                        message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                    except ValueError:
                        continue  # what a program prints next to its messages
                    await to_client.send(SessionMessage(message))

        async def writes() -> None:
            async for item in from_client:
                text = item.message.model_dump_json(by_alias=True, exclude_unset=True)
                stdin.write(text.encode() + b"\n")
                await stdin.drain()

        async def listens() -> None:
            while part := await stderr.read(4096):
                self._stderr += part
                del self._stderr[:-STDERR_BYTES]

        tasks = [asyncio.create_task(each()) for each in (reads, writes, listens)]
        try:
            yield incoming, outgoing
        finally:
            await _end(process)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for stream in (to_client, incoming, outgoing, from_client):
                await stream.aclose()


def _result(found: Any) -> tuple[ToolResult, int]:  # Any: a result of the library
    """The text of a tool's result; what is not text is named, and counted."""
    parts, omitted = [], 0
    for part in found.content:
        if getattr(part, "type", "") == "text":
            parts.append(part.text)
        else:
            omitted += 1
            parts.append(OMITTED.format(kind=getattr(part, "type", "part")))
    if not parts and found.structured_content is not None:
        parts.append(json.dumps(found.structured_content, ensure_ascii=False))
    return ToolResult("\n".join(parts), failed=bool(found.is_error)), omitted


def _reason(error: BaseException) -> str:
    """The first plain error of a group, in words."""
    first = first_of(error)
    return "" if isinstance(first, asyncio.CancelledError) else described(first)


def _signal(process: asyncio.subprocess.Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Let a program end by itself, then make it; its children too."""
    assert process.stdin is not None
    process.stdin.close()
    for number in (0, signal.SIGTERM, signal.SIGKILL):
        if number:
            _signal(process, number)
        if await _ended(process):
            break
    _signal(process, signal.SIGKILL)  # what it started and left
    # A child that is still there holds a pipe open; nothing public closes our end of it.
    transport = getattr(process, "_transport", None)
    if transport is not None:
        transport.close()


async def _ended(process: asyncio.subprocess.Process) -> bool:
    """Whether it ends within `PATIENCE_S`. Its `wait` also waits for those who hold its pipes."""
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while process.returncode is None:
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(0.01)
    return True
