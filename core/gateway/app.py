"""The gateway's routes: OpenAI's API for each episode, under the episode's key."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from posttrain.core.gateway.responses import read_response, response_json
from posttrain.core.gateway.session import MODEL, Session
from posttrain.core.gateway.wire import (
    Answer,
    ChatRequest,
    Refused,
    chat_json,
    chat_pieces,
    completion_json,
    digest_of,
    read_chat,
    read_completion,
)
from posttrain.core.rollout.plays import described

MOST_BODY = 16 * 2**20
"""Bytes of a request, at most."""
MARK = "idempotency-key"
KEEP_ALIVE_S = 10.0
LOOK_S = 0.5
"""How often it is looked whether a client that waits is still there."""
logger = logging.getLogger(__name__)
Json = dict[str, Any]  # Any: JSON values
Handler = Callable[[Request], Awaitable[Response]]
Form = Callable[[Answer, ChatRequest], Json]


class Sessions:
    """The episodes that are being played, by their keys."""

    def __init__(self) -> None:
        self._by_key: dict[str, Session] = {}

    def open(self, session: Session) -> None:
        self._by_key[session.key] = session

    def close(self, session: Session) -> None:
        self._by_key.pop(session.key, None)

    def of(self, request: Request) -> Session:
        """The session that the address names. Raises `Refused` for no key, and for two of them."""
        key = request.path_params["key"]
        session = self._by_key.get(key)
        if session is None:
            raise Refused(401, "unknown_key", "no episode has this key, or it is over")
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if bearer and bearer != key:
            raise Refused(
                401,
                "other_key",
                "the API key is not that of the address: give OPENAI_API_KEY of the same episode, "
                "or none",
            )
        return session

    def lost(self, key: str, why: str) -> None:
        """A call of this episode has no answer, by a fault of the gateway's."""
        if key in self._by_key:
            self._by_key[key].lost = why


def application(sessions: Sessions) -> Starlette:
    """The routes of all episodes; nothing else can be reached."""

    def asking(kind: str, read: Callable[[object, str], ChatRequest], form: Form) -> Handler:
        async def asked(request: Request) -> Response:
            session, raw = sessions.of(request), await _body(request)
            digest = digest_of(kind, raw, request.headers.get(MARK, ""))
            return await _answered(request, session, read(_json(raw), digest), form)

        return asked

    async def models(request: Request) -> Response:
        session = sessions.of(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "posttrain"}
        model["max_model_len"] = session.limits.max_model_len
        return JSONResponse({"object": "list", "data": [model]})

    async def reward(request: Request) -> Response:
        session, given = sessions.of(request), _json(await _body(request))
        if not isinstance(given, dict):
            given = {}
        value: Any = given.get("value")  # Any: JSON values
        call: Any = given.get("call")
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        fits = numeric and abs(value) <= sys.float_info.max  # which neither NaN nor 10^400 does
        if not fits or not (call is None or type(call) is int):
            wanted = 'expected {"value": 1.0}, or {"value": 1.0, "call": 0}'
            raise Refused(400, "invalid_reward", wanted)
        session.give_reward(float(value), call)
        return JSONResponse({"ok": True})

    def guarded(handler: Handler) -> Handler:
        async def answered(request: Request) -> Response:
            try:
                return await handler(request)
            except Refused as refused:
                return JSONResponse(refused.body(), refused.status, refused.headers())
            except Exception as error:  # a fault of ours, which must not pass for the program's
                logger.exception("a request of an episode could not be answered")
                why = f"a call could not be answered: {described(error)}"
                sessions.lost(request.path_params["key"], why)
                fault = Refused(500, "gateway_fault", "the gateway failed; see the run's log")
                return JSONResponse(fault.body(), fault.status, fault.headers())

        return answered

    def route(path: str, handler: Handler, method: str = "POST") -> list[Route]:
        roots = ("/e/{key}/v1", "/e/{key}")
        return [Route(root + path, guarded(handler), methods=[method]) for root in roots]

    return Starlette(
        routes=[
            *route("/chat/completions", asking("chat", read_chat, chat_json)),
            *route("/completions", asking("text", read_completion, completion_json)),
            *route("/responses", asking("responses", read_response, response_json)),
            *route("/models", models, "GET"),
            *route("/reward", reward),
        ],
        exception_handlers={404: _no_route},
    )


async def _no_route(request: Request, error: Exception) -> Response:
    known = "/chat/completions, /responses, /completions, /models and /reward"
    refused = Refused(404, "unknown_route", f"this API has {known}")
    return JSONResponse(refused.body(), refused.status, refused.headers())


async def _body(request: Request) -> bytes:
    found, size = [], 0
    async for part in request.stream():
        found.append(part)
        size += len(part)
        if size > MOST_BODY:
            raise Refused(413, "body_too_large", f"the body has more than {MOST_BODY} bytes")
    return b"".join(found)


def _json(raw: bytes) -> object:
    try:
        given = json.loads(raw)
        json.dumps(given, ensure_ascii=False).encode()  # half a character is not text
        return given
    except (ValueError, RecursionError) as error:
        raise Refused(400, "invalid_json", f"the body is not JSON: {error}") from error


async def _answered(request: Request, session: Session, asked: ChatRequest, form: Form) -> Response:
    retried = _is_retry(request)
    work = asyncio.get_running_loop().create_task(session.answer(asked, retried=retried))
    if asked.stream:
        await asyncio.wait({work}, timeout=LOOK_S)
        if work.done():  # an error that comes soon is not streamed
            session.deliver(asked, work.result())
        events = _events(work, session, asked)
        return StreamingResponse(events, media_type="text/event-stream")
    while not work.done():
        await asyncio.wait({work}, timeout=LOOK_S)
        if not work.done() and await request.is_disconnected():
            work.cancel()
            return Response(status_code=499)
    answer = work.result()
    session.deliver(asked, answer)
    return JSONResponse(form(answer, asked))


def _is_retry(request: Request) -> bool:
    """Whether the client marks the request as one that it made before."""
    count = request.headers.get("x-stainless-retry-count", "0")
    return MARK in request.headers or (count.isdecimal() and int(count) > 0)


async def _events(
    work: asyncio.Task[Answer], session: Session, asked: ChatRequest
) -> AsyncIterator[str]:
    """The answer as events, with comments while it is waited for."""
    try:
        while not work.done():
            await asyncio.wait({work}, timeout=KEEP_ALIVE_S)
            if not work.done():
                yield ": still sampling\n\n"
        try:
            answer = work.result()
        except Refused as refused:
            yield f"data: {json.dumps(refused.body())}\n\n"
            return
        session.deliver(asked, answer)
        for piece in chat_pieces(answer, asked):
            yield piece
    finally:
        work.cancel()  # a client that left; of one that is done nothing is left to cancel
