"""An OpenAI-compatible server of one model by the built-in engine: chat and plain completions."""

from __future__ import annotations

import asyncio
import hmac
import json
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator

from posttrain.core.data.messages import message_to_json, messages_from_json, tools_from_json
from posttrain.core.errors import DataError, PosttrainError
from posttrain.core.types import Message, SamplingParams, ToolSchema
from posttrain.pipelines.using.speaker import MOST_AT_ONCE, Answer, Cancelled, OnText, Speaker

Json = dict[str, Any]  # Any: JSON values

DEFAULT_MAX_TOKENS = 1024
"""Tokens of an answer where the request names no limit; the model's context bounds it too."""
MOST_BYTES = 8 * 2**20
"""Bytes of a request, at most."""
SERIOUS = {
    "response_format": "the built-in engine does not constrain answers to a format",
    "logit_bias": "the built-in engine does not change logits",
    "presence_penalty": "the built-in engine has no penalties",
    "frequency_penalty": "the built-in engine has no penalties",
    "top_logprobs": "the built-in engine gives the log-prob of the drawn token alone",
    "echo": "the built-in engine does not repeat the prompt",
    "suffix": "the built-in engine does not fill in",
    "best_of": "the built-in engine does not rank answers; use n",
    "min_p": "the built-in engine cuts by top_p and top_k alone",
    "typical_p": "the built-in engine cuts by top_p and top_k alone",
    "top_a": "the built-in engine cuts by top_p and top_k alone",
    "repetition_penalty": "the built-in engine has no penalties",
    "length_penalty": "the built-in engine has no penalties",
    "use_beam_search": "the built-in engine samples",
    "min_tokens": "the built-in engine has no shortest answer",
    "ignore_eos": "the built-in engine ends an answer where the model does",
    "stop_token_ids": "the built-in engine stops at texts; use stop",
    "bad_words": "the built-in engine does not change logits",
    "guided_json": "the built-in engine does not constrain answers to a format",
    "guided_regex": "the built-in engine does not constrain answers to a format",
    "guided_choice": "the built-in engine does not constrain answers to a format",
    "guided_grammar": "the built-in engine does not constrain answers to a format",
    "structured_outputs": "the built-in engine does not constrain answers to a format",
}
"""Fields whose being ignored would change what a client gets, and why they are refused."""
NEUTRAL: tuple[object, ...] = (None, 0, {}, [], False, {"type": "text"}, "")
NEUTRAL_AT_ONE = ("best_of", "typical_p", "repetition_penalty", "length_penalty")
"""Fields of `SERIOUS` whose value 1 changes nothing."""


class _Sampling(BaseModel):
    """What both kinds of requests share. Other fields of the API are ignored."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1)
    max_tokens: int | None = Field(default=None, ge=1)
    n: int = Field(default=1, ge=1, le=MOST_AT_ONCE)
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool = False
    stream_options: Json | None = None

    @model_validator(mode="before")
    @classmethod
    def _plain_json(cls, given: Any) -> Any:  # Any: JSON that nothing was checked of
        """Null is the default; half of a character, which no tokenizer takes, is refused."""
        if not isinstance(given, dict):
            return given
        try:
            json.dumps(given, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("a text holds half of a character: send whole ones") from error
        return {name: value for name, value in given.items() if value is not None}

    def params(self, limit: int | None = None) -> SamplingParams:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if any(not text for text in stops):
            raise DataError("stop: an empty string ends no answer; leave it out")
        # Each request without a seed has draws of its own, as clients expect.
        seed = uuid.uuid4().int % 2**31 if self.seed is None else self.seed
        return SamplingParams(
            num_generations=self.n,
            max_tokens=limit or self.max_tokens or DEFAULT_MAX_TOKENS,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            seed=seed,
            stop_strings=tuple(stops),
        )

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return bool((self.stream_options or {}).get("include_usage"))


class _ChatRequest(_Sampling):
    messages: list[Json]
    tools: list[Json] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None


class _TextRequest(_Sampling):
    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = Field(default=16, ge=1)
    logprobs: int | None = None


class Served:
    """One model behind the routes; counts nothing and keeps nothing of what is asked."""

    def __init__(self, speaker: Speaker, name: str) -> None:
        self.speaker, self.name, self.began = speaker, name, int(time.time())
        self.stopping = threading.Event()

    def check(self, asked: _Sampling) -> None:
        """Raise `DataError` for a request that would be answered as another one than it is."""
        extra = asked.model_extra or {}
        for field, why in SERIOUS.items():
            neutral = (*NEUTRAL, 1) if field in NEUTRAL_AT_ONE else NEUTRAL
            if field in extra and extra[field] not in neutral:
                raise DataError(f"{field}: {why}; leave it out, or serve the model by vLLM")

    async def run(
        self, generate: Callable[[OnText | None], list[Answer]], request: Request
    ) -> list[Answer]:
        """All answers; generation ends when the client goes away."""
        gone = threading.Event()

        def listen(number: int, piece: str) -> None:
            if gone.is_set() or self.stopping.is_set():
                raise Cancelled

        made = asyncio.create_task(asyncio.to_thread(generate, listen))
        while not made.done():
            await asyncio.wait([made], timeout=0.2)
            if await request.is_disconnected():
                gone.set()
        return await made

    async def stream(
        self, generate: Callable[[OnText | None], list[Answer]]
    ) -> AsyncIterator[tuple[int, str] | list[Answer]]:
        """Each piece of text as (number of the answer, text), then all answers.

        Closing the iterator ends the generation.
        """
        loop, gone = asyncio.get_running_loop(), threading.Event()
        pieces: asyncio.Queue[tuple[int, str] | None] = asyncio.Queue()

        def listen(number: int, piece: str) -> None:
            if gone.is_set() or self.stopping.is_set():
                raise Cancelled
            loop.call_soon_threadsafe(pieces.put_nowait, (number, piece))

        def work() -> list[Answer]:
            try:
                return generate(listen)
            finally:
                loop.call_soon_threadsafe(pieces.put_nowait, None)

        made = asyncio.create_task(asyncio.to_thread(work))
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            yield await made
        finally:
            gone.set()


def build_app(speaker: Speaker, name: str, api_key: str | None) -> FastAPI:
    """The server's routes. With `api_key`, all but `/health` need it as a bearer token."""
    app = FastAPI(title="posttrain", docs_url=None, redoc_url=None, openapi_url=None)
    served = Served(speaker, name)
    app.state.served = served

    @app.middleware("http")
    async def guard(request: Request, call_next: Any) -> Response:  # Any: of starlette
        if api_key is not None and request.url.path != "/health":
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), api_key.encode()):
                return failed(401, "the API key is missing or wrong: send Authorization: Bearer")
        if "transfer-encoding" in request.headers:  # of a size that only its end tells
            return failed(411, "send the request with a Content-Length, not in chunks")
        if int(request.headers.get("content-length") or 0) > MOST_BYTES:
            return failed(413, f"the request is larger than {MOST_BYTES} bytes")
        answer: Response = await call_next(request)
        return answer

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:]) or "body"
        return failed(400, f"{where}: {first['msg']}")

    @app.exception_handler(PosttrainError)
    async def refused(request: Request, error: PosttrainError) -> JSONResponse:
        return failed(400, str(error))

    @app.exception_handler(404)
    async def unknown(request: Request, error: Exception) -> JSONResponse:
        return failed(404, f"there is no {request.method} {request.url.path}: {ROUTES}")

    @app.get("/health")
    async def health() -> Json:
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models() -> Json:
        found = speaker.found
        own = {"root": name, "max_model_len": speaker.max_model_len}
        own |= {"posttrain": {"digest": found.digest}}
        entry = {"id": name, "object": "model", "created": served.began, "owned_by": "posttrain"}
        return {"object": "list", "data": [entry | own]}

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(asked: _ChatRequest, request: Request) -> Response:
        if (wrong := wrong_model(asked, name)) is not None:
            return wrong
        served.check(asked)
        return await _chat(served, asked, request)

    @app.post("/v1/completions", response_model=None)
    async def complete(asked: _TextRequest, request: Request) -> Response:
        if (wrong := wrong_model(asked, name)) is not None:
            return wrong
        served.check(asked)
        return await _complete(served, asked, request)

    return app


ROUTES = "the routes are /v1/models, /v1/chat/completions, /v1/completions and /health"


def failed(status: int, message: str) -> JSONResponse:
    """An error as OpenAI's clients read it."""
    kinds = {401: "authentication_error", 404: "not_found_error"}
    error = {"message": message, "type": kinds.get(status, "invalid_request_error")}
    return JSONResponse({"error": error | {"param": None, "code": status}}, status_code=status)


def wrong_model(asked: _Sampling, name: str) -> JSONResponse | None:
    """The answer to a request for another model than the one that is served."""
    if asked.model in (None, name):
        return None
    return failed(404, f"there is no model '{asked.model}' here: this server has '{name}'")


# --- chat ----------------------------------------------------------------------------------------


async def _chat(served: Served, asked: _ChatRequest, request: Request) -> Response:
    speaker = served.speaker
    messages = messages_from_json([_plain(m, i) for i, m in enumerate(asked.messages)], "messages")
    tools: Sequence[ToolSchema] = ()
    if asked.tools and asked.tool_choice != "none":
        tools = tools_from_json(asked.tools, "tools")
    prompt = speaker.tokenizer.encode_chat(messages, tools)
    check_room(speaker, prompt)
    params = asked.params(asked.max_completion_tokens)

    def generate(on_text: OnText | None) -> list[Answer]:
        return speaker.complete(prompt, params, on_text, tools=tools)

    head = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": served.name,
    }
    if not asked.stream:
        answers = await served.run(generate, request)
        choices = [_choice(speaker, i, answer, asked) for i, answer in enumerate(answers)]
        return JSONResponse(head | {"choices": choices, "usage": usage(answers)})
    head["object"] = "chat.completion.chunk"
    return events(_chat_events(served, generate, head, asked, tools))


def _plain(message: Mapping[str, Any], index: int) -> Json:
    """A message with its content as one text; parts other than text are refused."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise DataError(
                f"messages.{index}.content: a part is '{kind}', and the model reads text alone"
            )
        texts.append(str(part.get("text", "")))
    return dict(message) | {"content": "".join(texts)}


def _choice(speaker: Speaker, index: int, answer: Answer, asked: _ChatRequest) -> Json:
    made = _message(answer.message)
    finish = "tool_calls" if answer.message.tool_calls else _finish(answer)
    choice: Json = {"index": index, "message": made, "finish_reason": finish, "logprobs": None}
    if asked.logprobs:
        rows = zip(answer.token_ids, answer.logprobs, strict=answer.finish != "cancelled")
        choice["logprobs"] = {
            "content": [
                {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
                for text, value in ((speaker.tokenizer.token_text(t), v) for t, v in rows)
            ]
        }
    return choice


def _message(said: Message) -> Json:
    """The message in OpenAI's form: arguments of calls are JSON text, every call has an id."""
    made = message_to_json(said)
    for call in made.get("tool_calls", ()):
        call.setdefault("id", f"call_{uuid.uuid4().hex[:12]}")
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return made


def _finish(answer: Answer) -> str:
    return "stop" if answer.finish == "cancelled" else answer.finish


async def _chat_events(
    served: Served,
    generate: Callable[[OnText | None], list[Answer]],
    head: Json,
    asked: _ChatRequest,
    tools: Sequence[ToolSchema],
) -> AsyncIterator[Json]:
    """Chunks of a chat: roles, pieces of text, ends. With tools a message comes as a whole, since
    only its end shows what in it is a call."""

    def chunk(index: int, delta: Json, finish: str | None = None) -> Json:
        return head | {"choices": [{"index": index, "delta": delta, "finish_reason": finish}]}

    for index in range(asked.n):
        yield chunk(index, {"role": "assistant", "content": ""})
    answers: list[Answer] = []
    async for piece in served.stream(generate):
        if isinstance(piece, list):
            answers = piece
        elif not tools:
            yield chunk(piece[0], {"content": piece[1]})
    for index, answer in enumerate(answers):
        calls: list[Json] = []
        if tools:
            made = _message(answer.message)
            calls = [{"index": i} | call for i, call in enumerate(made.pop("tool_calls", []))]
            made.pop("role")
            yield chunk(index, made | ({"tool_calls": calls} if calls else {}))
        yield chunk(index, {}, "tool_calls" if calls else _finish(answer))
    if asked.with_usage:
        yield head | {"choices": [], "usage": usage(answers)}


# --- plain completions ---------------------------------------------------------------------------


async def _complete(served: Served, asked: _TextRequest, request: Request) -> Response:
    speaker, params = served.speaker, asked.params()
    prompts = _prompts(asked.prompt, speaker)
    for prompt in prompts:
        check_room(speaker, prompt)

    def generate(on_text: OnText | None) -> list[Answer]:
        answers = []
        for number, prompt in enumerate(prompts):

            def placed(index: int, piece: str, first: int = number * asked.n) -> None:
                if on_text is not None:
                    on_text(first + index, piece)

            answers += speaker.complete(prompt, params, placed)
        return answers

    head = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": served.name,
    }
    if not asked.stream:
        answers = await served.run(generate, request)
        choices = [_text_choice(speaker, i, answer, asked) for i, answer in enumerate(answers)]
        return JSONResponse(head | {"choices": choices, "usage": usage(answers, asked.n)})
    return events(_text_events(served, generate, head, asked))


def _prompts(given: Any, speaker: Speaker) -> list[tuple[int, ...]]:  # Any: of the four forms
    """Each prompt as tokens; text is read with its special tokens, as the model's own template."""
    many = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
    rows = speaker.tokenizer.tokenizer.get_vocab().values()
    most = max(rows, default=0)
    found = []
    for prompt in many:
        ids = (
            speaker.tokenizer.encode_text(prompt, special=True)
            if isinstance(prompt, str)
            else tuple(prompt)
        )
        if not ids or min(ids) < 0 or max(ids) > most:
            raise DataError(f"prompt: expected one or more tokens, each of 0 to {most}")
        found.append(ids)
    return found


def _text_choice(speaker: Speaker, index: int, answer: Answer, asked: _TextRequest) -> Json:
    choice: Json = {"index": index, "text": answer.text, "finish_reason": _finish(answer)}
    choice["logprobs"] = None
    if asked.logprobs is not None:
        texts = [speaker.tokenizer.token_text(token) for token in answer.token_ids]
        choice["logprobs"] = {"tokens": texts, "token_logprobs": list(answer.logprobs)}
    return choice


async def _text_events(
    served: Served,
    generate: Callable[[OnText | None], list[Answer]],
    head: Json,
    asked: _TextRequest,
) -> AsyncIterator[Json]:
    def chunk(index: int, text: str, finish: str | None = None) -> Json:
        choice = {"index": index, "text": text, "finish_reason": finish, "logprobs": None}
        return head | {"choices": [choice]}

    async for piece in served.stream(generate):
        if not isinstance(piece, list):
            yield chunk(*piece)
            continue
        for index, answer in enumerate(piece):
            yield chunk(index, "", _finish(answer))
        if asked.with_usage:
            yield head | {"choices": [], "usage": usage(piece, asked.n)}


# --- what both share -----------------------------------------------------------------------------


def check_room(speaker: Speaker, prompt: Sequence[int]) -> None:
    """Raise `DataError` before a stream begins for a prompt that leaves no room."""
    if len(prompt) >= speaker.max_model_len:
        raise DataError(
            f"the prompt has {len(prompt)} tokens and the model's context "
            f"{speaker.max_model_len}: shorten it"
        )


def usage(answers: Sequence[Answer], each: int | None = None) -> Json:
    """Numbers of tokens; a prompt counts once for its `each` answers, all of them if None."""
    step = each or max(len(answers), 1)
    read = sum(answer.prompt_tokens for answer in answers[::step])
    written = sum(len(answer.token_ids) for answer in answers)
    total = read + written
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": total}


def events(chunks: AsyncIterator[Json]) -> StreamingResponse:
    """Chunks as server-sent events, ended by `[DONE]`; an error is the last event."""

    async def lines() -> AsyncIterator[str]:
        try:
            async for chunk in chunks:
                yield f"data: {json.dumps(chunk)}\n\n"
        except PosttrainError as error:
            yield f"data: {json.dumps({'error': {'message': str(error)}})}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


def serve(app: FastAPI, host: str, port: int, ready: Callable[[], None]) -> None:
    """Serve until SIGINT or SIGTERM, which raise `KeyboardInterrupt` once all has ended."""
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:  # Any: as uvicorn declares it
            await super().startup(sockets)
            if self.started:
                ready()

        async def shutdown(self, sockets: Any = None) -> None:  # Any: as above
            app.state.served.stopping.set()  # requests in progress end with what they have
            await super().shutdown(sockets)

    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=5,
        lifespan="off",
    )
    Server(config).run()
