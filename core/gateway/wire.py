"""The JSON of OpenAI's chat and completion APIs: requests read, answers and errors written."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.core.data.messages import messages_from_json, tools_from_json
from posttrain.core.errors import DataError
from posttrain.core.types import Completion, Message, ToolSchema

Json = dict[str, Any]  # Any: JSON values
MOST_MESSAGES = 2000
MOST_TOOLS = 128
MOST_N = 64
PIECE = 24
"""Characters of a piece of a streamed answer."""


class Refused(Exception):
    """A request that gets an error: its HTTP status and the API's code and words."""

    def __init__(self, status: int, code: str, message: str, *, again: bool = False) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.again = status, code, message, again

    def body(self) -> Json:
        """As the API writes errors."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": None, "code": self.code}
        return {"error": error}

    def headers(self) -> dict[str, str]:
        """Whether clients are to try again: most do for some errors unless it is forbidden."""
        return {"x-should-retry": "true" if self.again else "false"}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What a program asks of the policy; `set_by_client` are fields that the run decides."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...]
    max_tokens: int | None
    stop: tuple[str, ...]
    n: int
    stream: bool
    usage: bool
    logprobs: bool
    prompt: str | tuple[int, ...] | None
    set_by_client: Mapping[str, object]
    digest: str


OWNED = ("temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty")


def read_chat(body: object, digest: str) -> ChatRequest:
    """A request to `/chat/completions`; raises `Refused` with the field and the reason."""
    given = _object(body)
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused(400, "invalid_messages", "messages: expected a list that is not empty")
    if len(messages) > MOST_MESSAGES:
        raise Refused(400, "invalid_messages", f"messages: more than {MOST_MESSAGES}")
    try:
        read = messages_from_json(messages, "messages")
        tools = tools_from_json(given.get("tools"), "tools")
    except DataError as error:
        raise Refused(400, "invalid_messages", str(error)) from error
    if given.get("tool_choice") == "none":
        tools = ()
    if len(tools) > MOST_TOOLS:
        raise Refused(400, "invalid_tools", f"tools: more than {MOST_TOOLS}")
    shape = given.get("response_format")
    if isinstance(shape, dict) and shape.get("type", "text") != "text":
        raise Refused(
            400,
            "unsupported_response_format",
            f"response_format: '{shape.get('type')}' would need masked sampling, whose log-probs "
            "are not the policy's; ask for text, and say in the prompt which form it has",
        )
    return _request(given, digest, messages=read, tools=tools, prompt=None)


def read_completion(body: object, digest: str) -> ChatRequest:
    """A request to `/completions`: a text, or token ids."""
    given = _object(body)
    prompt = given.get("prompt")
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        prompt = tuple(prompt)
    elif not isinstance(prompt, str) or not prompt:
        raise Refused(400, "invalid_prompt", "prompt: expected a text, or a list of token ids")
    return _request(given, digest, messages=(), tools=(), prompt=prompt)


def _object(body: object) -> Json:
    if not isinstance(body, dict):
        raise Refused(400, "invalid_json", "the body: expected a JSON object")
    return body


def _request(
    given: Json,
    digest: str,
    *,
    messages: tuple[Message, ...],
    tools: tuple[ToolSchema, ...],
    prompt: str | tuple[int, ...] | None,
) -> ChatRequest:
    stop = given.get("stop")
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if not all(isinstance(each, str) and each for each in stops):
        raise Refused(400, "invalid_stop", "stop: expected texts that are not empty")
    options = given.get("stream_options")
    return ChatRequest(
        messages=messages,
        tools=tools,
        max_tokens=_whole(given, ("max_completion_tokens", "max_tokens"), 10**9),
        stop=stops,
        n=_whole(given, ("n",), MOST_N) or 1,
        stream=given.get("stream") is True,
        usage=isinstance(options, dict) and options.get("include_usage") is True,
        logprobs=given.get("logprobs") not in (None, False),
        prompt=prompt,
        set_by_client={name: given[name] for name in OWNED if given.get(name) is not None},
        digest=digest,
    )


def _whole(given: Json, names: Sequence[str], most: int) -> int | None:
    for name in names:
        value = given.get(name)
        if value is None:
            continue
        if type(value) is not int or not 1 <= value <= most:
            raise Refused(400, f"invalid_{name}", f"{name}: expected a whole number, 1 to {most}")
        return value
    return None


def digest_of(path: str, body: bytes) -> str:
    """What says that two requests are the same one."""
    return hashlib.sha256(path.encode() + b"\n" + body).hexdigest()


@dataclass(frozen=True, slots=True)
class Served:
    """One answer as the program reads it, and the tokens that it is made of."""

    message: Message
    sampled: Completion
    texts: tuple[str, ...]
    """Of each sampled token."""

    @property
    def finish(self) -> str:
        """As the API says it."""
        if self.message.tool_calls:
            return "tool_calls"
        return "length" if self.sampled.finish_reason == "length" else "stop"


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request: `n` choices."""

    number: int
    model: str
    prompt_ids: tuple[int, ...]
    choices: tuple[Served, ...]

    def usage(self) -> Json:
        """Tokens of the prompt and of the answers."""
        shown = len(self.prompt_ids)
        own = sum(len(choice.sampled.token_ids) for choice in self.choices)
        return {"prompt_tokens": shown, "completion_tokens": own, "total_tokens": shown + own}


def chat_json(answer: Answer, request: ChatRequest) -> Json:
    """The body of an answer from `/chat/completions`."""
    choices = []
    for index, choice in enumerate(answer.choices):
        made: Json = {"index": index, "message": _message(choice), "finish_reason": choice.finish}
        made["logprobs"] = {"content": _logprobs(choice)} if request.logprobs else None
        choices.append(made)
    return {**_head(answer, "chat.completion"), "choices": choices, "usage": answer.usage()}


def completion_json(answer: Answer, request: ChatRequest) -> Json:
    """The body of an answer from `/completions`."""
    choices = []
    for index, choice in enumerate(answer.choices):
        finish = "length" if choice.sampled.finish_reason == "length" else "stop"
        made: Json = {"index": index, "text": choice.message.content, "finish_reason": finish}
        made["logprobs"] = None
        if request.logprobs:
            made["logprobs"] = {
                "tokens": list(choice.texts),
                "token_logprobs": list(choice.sampled.logprobs),
            }
        choices.append(made)
    return {**_head(answer, "text_completion"), "choices": choices, "usage": answer.usage()}


def chat_pieces(answer: Answer, request: ChatRequest) -> Iterator[str]:
    """The answer as server-sent events."""
    head = _head(answer, "chat.completion.chunk")

    def event(index: int, delta: Json, finish: str | None = None) -> str:
        choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": None}
        return f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"

    for index, choice in enumerate(answer.choices):
        message = _message(choice)
        yield event(index, {"role": "assistant", "content": ""})
        if "reasoning_content" in message:
            yield event(index, {"reasoning_content": message["reasoning_content"]})
        text = choice.message.content
        for start in range(0, len(text), PIECE):
            yield event(index, {"content": text[start : start + PIECE]})
        for number, call in enumerate(message.get("tool_calls", ())):
            yield event(index, {"tool_calls": [{"index": number, **call}]})
        yield event(index, {}, choice.finish)
    if request.usage:
        yield f"data: {json.dumps({**head, 'choices': [], 'usage': answer.usage()})}\n\n"
    yield "data: [DONE]\n\n"


def _head(answer: Answer, kind: str) -> Json:
    return {
        "id": f"call-{answer.number}",
        "object": kind,
        "created": int(time.time()),
        "model": answer.model,
    }


def _message(choice: Served) -> Json:
    message = choice.message
    made: Json = {"role": "assistant", "content": message.content or None}
    if not message.tool_calls:
        made["content"] = message.content
    if message.reasoning:
        made["reasoning_content"] = message.reasoning
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(dict(call.arguments), ensure_ascii=False),
                },
            }
            for call in message.tool_calls
        ]
    return made


def _logprobs(choice: Served) -> list[Json]:
    pairs = zip(choice.texts, choice.sampled.logprobs, strict=True)
    return [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in pairs
    ]
