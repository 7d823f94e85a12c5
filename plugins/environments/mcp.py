"""MCP: the tools of servers that speak the Model Context Protocol, as calls of the model."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from posttrain.core.contracts import LiveEnvironment, Observation, Opening, ToolResult, Turn
from posttrain.core.errors import ConfigError, nearest
from posttrain.core.rollout.external import require
from posttrain.core.rollout.mcp_session import McpServer, McpSession
from posttrain.core.rollout.tool_use import CallLimits, answered, no_such_tool
from posttrain.core.types import Problem, ToolCall, ToolSchema


class McpConfig(CallLimits):
    """Settings of `mcp`."""

    servers: tuple[McpServer, ...] = Field(
        min_length=1, description="each {command: [...], pass_env: [...]} or {url: ...}"
    )
    allow: tuple[str, ...] = Field(
        default=(), description="tools that the model may call; empty = all of the servers'"
    )
    session: Literal["episode", "run"] = Field(
        default="episode",
        description="episode: each episode has a session of its own, for servers with a state; "
        "run: all share one, for servers without",
    )
    timeout_s: float = Field(default=30.0, gt=0, le=3600, description="seconds of a call, at most")
    start_s: float = Field(
        default=60.0, gt=0, le=3600, description="seconds of a connection's start, at most"
    )
    max_result_bytes: int = Field(
        default=1 << 20,
        ge=1024,
        le=1 << 30,
        description="bytes of a server's message, at most; a longer one ends the session",
    )


@dataclass(slots=True)
class Sessions:
    """The sessions of an episode, one a server, and the calls that it made."""

    each: list[McpSession]
    made: int = 0
    own: bool = True


class McpEnvironment(LiveEnvironment[McpConfig]):
    """observation = a message of role tool with the server's result, for each call of the turn.

    The prompt offers the servers' tools with their JSON schemas. What a tool refuses, a call of no
    tool or beyond `max_calls`, and one that takes longer than `timeout_s` is an error that the
    model reads, and counts as failed. A server that ends fails the episode. A turn without calls is
    the answer. Source: the Model Context Protocol, 2025-11-25 and 2026-07-28.
    """

    name = "mcp"
    Config = McpConfig
    at_once = 4 * (os.cpu_count() or 1)

    def __init__(self, config: McpConfig) -> None:
        super().__init__(config)
        self._schemas: tuple[ToolSchema, ...] = ()
        self._server_of: dict[str, int] = {}
        self._shared: list[McpSession] | None = None

    async def start(self) -> None:
        """List the servers' tools. Raises `ResourceError` for a server that cannot be reached."""
        require("mcp", self.name, "mcp")
        sessions, tools = await self._open()
        if self.config.session == "run":
            self._shared = sessions
        else:
            await _close(sessions)
        for number, listed in enumerate(tools):
            for tool in listed:
                if self.config.allow and tool.name not in self.config.allow:
                    continue
                if tool.name in self._server_of:
                    raise ConfigError(
                        f"environment 'mcp': two servers have a tool '{tool.name}'; name those "
                        "that the model may call in `allow`, or remove a server"
                    )
                self._server_of[tool.name] = number
        known = [tool for listed in tools for tool in listed]
        names = [str(tool.name) for tool in known]
        for name in self.config.allow:
            if name not in names:
                raise ConfigError(
                    f"environment 'mcp': allow: no server has a tool '{name}'"
                    f"{nearest(name, names)} (their tools: {sorted(names)})"
                )
        if not self._server_of:
            raise ConfigError("environment 'mcp': the servers have no tools; name others")
        self._schemas = tuple(_schema(tool) for tool in known if tool.name in self._server_of)

    def schemas(self) -> tuple[ToolSchema, ...]:
        """The tools that the model may call."""
        return self._schemas

    async def reset(self, problem: Problem, seed: int) -> Opening:
        """No calls yet, in sessions of the episode's own or those of all."""
        if self._shared is not None:
            return Opening(Sessions(self._shared, own=False))
        sessions, _ = await self._open()
        return Opening(Sessions(sessions))

    async def step(self, state: object, turn: Turn) -> Observation:
        """The results of the calls that `turn` makes, one after another."""
        assert isinstance(state, Sessions)
        said = turn.message
        if not said.tool_calls and not said.malformed:
            return Observation("", True, state)
        results, omitted = [], 0
        for call in said.tool_calls:
            result, parts = await self._result(state, call)
            state.made += 1
            omitted += parts
            results.append(result)
        messages, counts = answered(said, results, self.config.max_result_chars)
        counts["metric/omitted"] = float(omitted)
        return Observation("", False, state, counts, messages)

    async def close(self, state: object) -> None:
        """End the sessions, where they are the episode's own."""
        assert isinstance(state, Sessions)
        if state.own:
            await _close(state.each)

    async def stop(self) -> None:
        """End the sessions that all episodes share."""
        shared, self._shared = self._shared, None
        await _close(shared or [])

    async def _result(self, state: Sessions, call: ToolCall) -> tuple[ToolResult, int]:
        if state.made >= self.config.max_calls:
            return self.config.none_left(), 0
        number = self._server_of.get(call.name)
        if number is None:
            return no_such_tool(self._server_of), 0
        return await state.each[number].call(call.name, call.arguments)

    async def _open(self) -> tuple[list[McpSession], list[list[Any]]]:
        """A session with each server, and the tools of each; all of them or none."""
        config = self.config
        sessions = [
            McpSession(server, config.timeout_s, config.max_result_bytes)
            for server in config.servers
        ]
        try:
            tools = [await session.open(config.start_s) for session in sessions]
        except BaseException:
            await _close(sessions)
            raise
        return sessions, tools


async def _close(sessions: list[McpSession]) -> None:
    await asyncio.gather(*(session.close() for session in sessions))


def _schema(tool: Any) -> Mapping[str, Any]:  # Any: a tool of the library
    described = {"name": tool.name, "description": tool.description or ""}
    return {"type": "function", "function": {**described, "parameters": tool.input_schema}}
