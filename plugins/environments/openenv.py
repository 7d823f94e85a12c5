"""OpenEnv: environments behind a server that speaks OpenEnv's WebSocket protocol."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from posttrain.core.contracts import LiveEnvironment, Observation, Opening, PluginConfig, Turn
from posttrain.core.errors import ConfigError, ResourceError
from posttrain.core.rollout.external import VariableName, episode_seed, require, variable
from posttrain.core.rollout.tool_use import MALFORMED, reply
from posttrain.core.types import Problem, ToolSchema

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

Json = dict[str, Any]  # Any: JSON values
ACT, TEXT = "act", "{text}"
REFUSED = "error: the environment refused the action"
FULL = "CAPACITY_REACHED"
OF_AN_ACTION = ("EXECUTION_ERROR", "VALIDATION_ERROR")
"""Errors after which the session goes on."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.05, 1.0
CLOSE_S = 2.0


class OpenEnvConfig(PluginConfig):
    """Settings of `openenv`."""

    url: str = Field(description="the server, as http://127.0.0.1:8000")
    headers: dict[str, VariableName] = Field(
        default={}, description="header -> NAME of the environment variable with its value"
    )
    action: Json | None = Field(
        default=None,
        description="the action of a turn, where {text} is what the model wrote, as {message: "
        '"{text}"}; null = the model calls a function `act` with the fields of the action',
    )
    reset: Json = Field(default={}, description="further fields of the request that resets")
    show: tuple[str, ...] = Field(
        default=(), description="fields of the observation that the model sees; empty = all"
    )
    max_chars: int = Field(default=4000, ge=1, description="characters of an observation, at most")
    timeout_s: float = Field(
        default=60.0, gt=0, le=3600, description="seconds of a step, at most; then it has failed"
    )
    max_message_bytes: int = Field(
        default=8 << 20, ge=1024, le=1 << 30, description="bytes of a server's message, at most"
    )

    @field_validator("url")
    @classmethod
    def _is_a_server(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("expected a URL like http://127.0.0.1:8000")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError("a URL is logged, so it holds no key: name a variable in headers")
        return value.rstrip("/")

    @field_validator("action")
    @classmethod
    def _has_the_text(cls, value: Json | None) -> Json | None:
        if value is not None and TEXT not in json.dumps(value):
            raise ValueError("the action has no {text}: all turns would be the same")
        return value


@dataclass(slots=True)
class Session:
    """An episode's socket, which is a session of the server's."""

    socket: ClientConnection


class ServerError(Exception):
    """An error that the server reports. Its text is not for the model."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"the OpenEnv server reports {code}: {message[:300]}")
        self.code = code


class OpenEnvEnvironment(LiveEnvironment[OpenEnvConfig]):
    """o', r, done = the server's answer to the turn's action, in a session of the episode's own.

    The prompt ends with the first observation. The seed is the problem's (task `episodes`), so that
    all episodes of a problem begin in one state. An action that the server refuses is answered by a
    fixed text, has the reward 0 and counts as failed; a server that ends, or is late, fails the
    episode. One without a free session is asked again until `step_s` is over. Source: OpenEnv's
    WebSocket protocol, version 0.10, spoken directly.
    """

    name = "openenv"
    Config = OpenEnvConfig

    def __init__(self, config: OpenEnvConfig) -> None:
        super().__init__(config)
        self._schemas: tuple[ToolSchema, ...] = ()
        self._headers: dict[str, str] = {}
        parts = urlsplit(config.url)
        self._secure = parts.scheme == "https"
        self._here = parts.hostname in ("127.0.0.1", "localhost", "::1")

    async def start(self) -> None:
        """Ask the server for the form of its actions. Raises `ResourceError` where none answers."""
        require("websockets", self.name, "openenv")
        self._headers = {
            name: variable(value, f"the header {name} of {self.config.url}")
            for name, value in self.config.headers.items()
        }
        found = await self._got("/health" if self.config.action is not None else "/schema")
        if self.config.action is not None:
            return
        action = found.get("action") if isinstance(found, Mapping) else None
        if not isinstance(action, Mapping):
            raise ConfigError(
                f"environment 'openenv': {self.config.url}/schema has no schema of an action; set "
                'action: {FIELD: "{text}"}'
            )
        properties = {k: v for k, v in action.get("properties", {}).items() if k != "metadata"}
        parameters = {**action, "type": "object", "properties": properties}
        about = str(action.get("description") or "takes an action")
        described = {"name": ACT, "description": about, "parameters": parameters}
        self._schemas = ({"type": "function", "function": described},)

    def schemas(self) -> tuple[ToolSchema, ...]:
        """The function `act`, where actions are its calls."""
        return self._schemas

    async def reset(self, problem: Problem, seed: int) -> Opening:
        """A session, as soon as the server has one, and what one sees first."""
        asked = {**self.config.reset, "seed": episode_seed(problem), "episode_id": str(seed)}
        wait_s = FIRST_WAIT_S
        while True:
            session = Session(await self._connected())
            try:
                found = await self._asked(session, "reset", asked)
                return Opening(session, suffix=f"\n\n{self._seen(found)}")
            except BaseException as error:
                await self.close(session)
                if not isinstance(error, ServerError) or error.code != FULL:
                    raise
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def step(self, state: object, turn: Turn) -> Observation:
        """What follows the action of `turn`."""
        assert isinstance(state, Session)
        action, wrong = self._action(turn)
        found: Json = {}
        if not wrong:
            try:
                found = await self._asked(state, "step", action)
            except ServerError as error:
                if error.code not in OF_AN_ACTION:
                    raise
                wrong = REFUSED
        counts = {"calls": 1.0, "failed": float(bool(wrong))}
        if wrong:
            return Observation("", False, state, counts, reply(turn.message, wrong), 0.0)
        reward = found.get("reward")
        if reward is not None:
            reward = float(reward)
            if not math.isfinite(reward):
                raise ValueError(f"the OpenEnv server gives the reward {reward}, not a number")
        done = bool(found.get("done"))
        messages = reply(turn.message, self._seen(found))
        return Observation("", done, state, counts, messages, reward)

    async def close(self, state: object) -> None:
        """End the session."""
        from websockets.exceptions import ConnectionClosed

        assert isinstance(state, Session)
        try:
            await asyncio.wait_for(state.socket.send(json.dumps({"type": "close"})), CLOSE_S)
        except (ConnectionClosed, TimeoutError):
            pass
        await state.socket.close()

    def _action(self, turn: Turn) -> tuple[Json, str]:
        """The action of a turn, or why there is none."""
        if self.config.action is not None:
            filled: Json = _filled(self.config.action, turn.message.content)
            return filled, ""
        calls = turn.message.tool_calls
        if not calls:
            return {}, MALFORMED if turn.message.malformed else f"error: call `{ACT}`"
        if calls[0].name != ACT:
            return {}, f"error: no such tool; call `{ACT}`"
        return dict(calls[0].arguments), ""

    def _seen(self, found: Json) -> str:
        """An observation as text: of one field with a text the text itself."""
        observation = found["observation"]
        names = self.config.show or tuple(observation)
        values = {name: observation[name] for name in names if name in observation}
        (text, *others) = values.values() if values else ("",)
        if others or not isinstance(text, str):
            text = json.dumps(values, ensure_ascii=False)
        return text[: self.config.max_chars]

    async def _connected(self) -> ClientConnection:
        from websockets.asyncio.client import connect
        from websockets.exceptions import InvalidHandshake

        address = "ws" + self.config.url.removeprefix("http") + "/ws"
        try:
            return await connect(
                address,
                additional_headers=self._headers,
                max_size=self.config.max_message_bytes,
                open_timeout=self.config.timeout_s,
                close_timeout=CLOSE_S,
                proxy=None if self._here else True,  # a proxy is for hosts elsewhere
            )
        except (OSError, InvalidHandshake) as error:
            raise ConnectionError(
                f"the OpenEnv server {self.config.url} cannot be reached ({error})"
            ) from error

    async def _asked(self, session: Session, kind: str, data: Json) -> Json:
        """The answer to one request. After one that is late nothing more is read: it would be taken
        for the answer to the next."""
        from websockets.exceptions import ConnectionClosed

        try:
            async with asyncio.timeout(self.config.timeout_s):
                try:
                    await session.socket.send(json.dumps({"type": kind, "data": data}))
                except ConnectionClosed:
                    pass  # it may have said why before
                text = await session.socket.recv()
        except TimeoutError:
            await session.socket.close()
            raise TimeoutError(
                f"the OpenEnv server gave no answer to `{kind}` within {self.config.timeout_s:g} s"
            ) from None
        except ConnectionClosed as error:
            raise ConnectionError(
                f"the OpenEnv server closed the session during `{kind}` ({error})"
            ) from error
        try:
            found = json.loads(text)
            body = found["data"]
            if found["type"] == "error":
                raise ServerError(str(body.get("code")), str(body.get("message")))
            if found["type"] != "observation" or not isinstance(body["observation"], dict):
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"the server's answer to `{kind}` is not an observation: {str(text)[:80]!r}"
            ) from error
        return dict(body)

    async def _got(self, path: str) -> Any:  # Any: JSON
        import httpx

        url = self.config.url + path
        try:
            async with httpx.AsyncClient(
                headers=self._headers,
                timeout=self.config.timeout_s,
                trust_env=not self._here,
                verify=self._secure,
            ) as client:
                answer = await client.get(url)
                answer.raise_for_status()
                return answer.json()
        except (httpx.HTTPError, ValueError) as error:
            reason = str(error).split("\n")[0] or type(error).__name__
            raise ResourceError(
                f"environment 'openenv': {url} does not answer ({reason}): start the server, or "
                "correct url"
            ) from error


def _filled(value: Any, text: str) -> Any:  # Any: JSON
    """`value` with `text` in the place of {text}."""
    if isinstance(value, str):
        return value.replace(TEXT, text)
    if isinstance(value, Mapping):
        return {key: _filled(item, text) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_filled(item, text) for item in value]
    return value
