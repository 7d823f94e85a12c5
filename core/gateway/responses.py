"""The JSON of OpenAI's Responses API: its requests as those of chat, and answers in its form."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from posttrain.core.gateway.wire import (
    NOT_SAMPLED,
    Answer,
    ChatRequest,
    Refused,
    chat_message,
    read_chat,
)

Json = dict[str, Any]  # Any: JSON values
LATER = ("previous_response_id", "conversation", "background", "stream")
"""Fields by which a request would be another one than it says, or be answered otherwise."""


def read_response(body: object, digest: str) -> ChatRequest:
    """A request to `/responses`; raises `Refused` with the field and the reason.

    It is read as `/chat/completions` would take it: what the assistant said and the calls that
    follow it are one message.
    """
    if not isinstance(body, dict):
        raise Refused(400, "invalid_json", "the body: expected a JSON object")
    for name in LATER:
        if body.get(name):
            raise Refused(
                400, f"unsupported_{name}", f"{name}: send the whole input, and wait for the answer"
            )
    shape, tools = body.get("text"), body.get("tools") or []
    if not isinstance(tools, list):
        raise Refused(400, "invalid_tools", "tools: expected a list")
    made: Json = {
        "messages": _messages(body),
        "tools": [_tool(tool) for tool in tools],
        "max_tokens": body.get("max_output_tokens"),
        "tool_choice": body.get("tool_choice"),
        "response_format": shape.get("format") if isinstance(shape, Mapping) else None,
    }
    made |= {name: body[name] for name in ("temperature", "top_p") if name in body}
    return read_chat(made, digest)


def _messages(body: Json) -> list[Json]:
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise Refused(400, "invalid_input", "input: expected a text or a list that is not empty")
    system = body.get("instructions")
    messages: list[Json] = [{"role": "system", "content": system}] if system else []
    for number, item in enumerate(items):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            messages.append({"role": item.get("role"), "content": _content(item.get("content"))})
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = _content(item.get("output"))
            messages.append(
                {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
            )
        elif kind != "reasoning":  # what was thought may be left out, as in chats
            raise Refused(
                400, "invalid_input", f"input[{number}]: there are no items of type {kind!r} here"
            )
    return messages


def _content(value: object) -> object:
    """Parts of text, which have names of their own here, as those of chats."""
    if not isinstance(value, list):
        return value
    names = ("input_text", "output_text", "text")
    return [
        {**part, "type": "text"} if isinstance(part, dict) and part.get("type") in names else part
        for part in value
    ]


def _tool(tool: object) -> Json:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise Refused(400, "invalid_tools", "tools: only those of type function can be called here")
    names = ("name", "description", "parameters")
    return {"type": "function", "function": {n: tool[n] for n in names if n in tool}}


def response_json(answer: Answer, request: ChatRequest) -> Json:
    """The answer's first choice as a response."""
    choice = answer.choices[0]
    message = chat_message(choice)
    name = "budget" if answer.number == NOT_SAMPLED else f"call-{answer.number}"
    output: list[Json] = []
    if message.get("content") or not message.get("tool_calls"):
        part: Json = {"type": "output_text", "text": message["content"] or "", "annotations": []}
        output.append({"type": "message", "role": "assistant", "content": [part]})
    for call in message.get("tool_calls", ()):
        output.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    for number, item in enumerate(output):
        item |= {"id": f"{name}-{number}", "status": "completed"}
    cut = choice.finish == "length"
    usage = answer.usage()
    return {
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "model": answer.model,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }
