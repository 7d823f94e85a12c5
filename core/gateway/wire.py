"""The JSON of OpenAI's chat and completion APIs: requests read, answers and errors written."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from posttrain.core.data.messages import messages_from_json, tools_from_json
from posttrain.core.errors import DataError
from posttrain.core.types import Completion, Message, ToolSchema

Json = dict[str, Any]  # Any: JSON values
MOST_MESSAGES = 2000
MOST_TOOLS = 128
MOST_SCHEMA = 64 * 2**10
MOST_N = 64
MOST_STOPS = 16
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
    """What a program asks of the policy; `set_by_client` are fields that the run decides.

    `must_call` = it wants a tool to be called, which sampling does not force.
    """

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
    must_call: bool
    digest: str


OWNED = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)
"""Fields that the run sets, whatever a program asks for: log-probs are those of its own policy."""


def read_chat(body: object, digest: str) -> ChatRequest:
    """A request to `/chat/completions`; raises `Refused` with the field and the reason."""
    given = _object(body)
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused(400, "invalid_messages", "messages: expected a list that is not empty")
    if len(messages) > MOST_MESSAGES:
        raise Refused(400, "invalid_messages", f"messages: more than {MOST_MESSAGES}")
    try:
        read = _named(messages_from_json(messages, "messages"))
    except DataError as error:
        raise Refused(400, "invalid_messages", _without_advice(error)) from error
    try:
        tools = tools_from_json(given.get("tools"), "tools")
    except DataError as error:
        raise Refused(400, "invalid_tools", _without_advice(error)) from error
    for old in ("functions", "function_call"):
        if given.get(old):
            raise Refused(400, "unsupported_functions", f"{old}: send tools in its place")
    if given.get("tool_choice") == "none":
        tools = ()
    if len(tools) > MOST_TOOLS:
        raise Refused(400, "invalid_tools", f"tools: more than {MOST_TOOLS}")
    for tool in tools:
        if len(json.dumps(tool)) > MOST_SCHEMA:
            name = tool["function"]["name"]
            raise Refused(400, "invalid_tools", f"tools: '{name}' has over {MOST_SCHEMA} letters")
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
    if given.get("stream") is True:
        raise Refused(400, "unsupported_stream", "stream: only chat completions are streamed")
    return _request(given, digest, messages=(), tools=(), prompt=prompt)


def _named(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages with each tool's name, which programs leave to the id of the call."""
    names: dict[str, str] = {}
    made = []
    for message in messages:
        names.update({call.id: call.name for call in message.tool_calls if call.id})
        if message.role == "tool" and not message.name:
            message = replace(message, name=names.get(message.tool_call_id, ""))
        made.append(message)
    return tuple(made)


def _without_advice(error: DataError) -> str:
    """What is wrong, without what to do with a row of a data set."""
    return str(error).removesuffix(": correct this row").removesuffix(": correct it")


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
    stops = [stop] if isinstance(stop, str) else stop or []
    fits = isinstance(stops, list) and len(stops) <= MOST_STOPS
    if not fits or not all(isinstance(each, str) and each for each in stops):
        raise Refused(
            400, "invalid_stop", f"stop: expected at most {MOST_STOPS} texts that are not empty"
        )
    options = given.get("stream_options")
    return ChatRequest(
        messages=messages,
        tools=tools,
        max_tokens=_whole(given, ("max_completion_tokens", "max_tokens"), 10**9),
        stop=tuple(stops),
        n=_whole(given, ("n",), MOST_N) or 1,
        stream=given.get("stream") is True,
        usage=isinstance(options, dict) and options.get("include_usage") is True,
        logprobs=given.get("logprobs") not in (None, False),
        prompt=prompt,
        set_by_client={name: given[name] for name in OWNED if given.get(name) is not None},
        must_call=given.get("tool_choice") not in (None, "none", "auto"),
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


def digest_of(path: str, body: bytes, mark: str = "") -> str:
    """What says that two requests are the same one; `mark` is the client's own word for it."""
    return hashlib.sha256(f"{path}\n{mark}\n".encode() + body).hexdigest()


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


NOT_SAMPLED = -1
"""The number of an answer that the gateway wrote itself."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request: `n` choices, which are calls `number` and those that follow."""

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
        made: Json = {
            "index": index,
            "message": chat_message(choice),
            "finish_reason": choice.finish,
        }
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
        message = chat_message(choice)
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
        "id": "budget" if answer.number == NOT_SAMPLED else f"call-{answer.number}",
        "object": kind,
        "created": int(time.time()),
        "model": answer.model,
    }


def chat_message(choice: Served) -> Json:
    """The answer as a message of a chat."""
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
