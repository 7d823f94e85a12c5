"""Chat messages as JSON: read from data with errors that name the row, written for templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from posttrain.core.errors import DataError, nearest
from posttrain.core.runtime.json_files import NotJson, loads
from posttrain.core.types import Message, Role, ToolCall, ToolSchema

Json = dict[str, Any]  # Any: JSON values

ROLES: dict[str, Role] = {role: role for role in get_args(Role)} | {
    "developer": "system",
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
}
"""Names that data sets use, and the role that each means."""

EXAMPLE = '{"role": "user", "content": "2 + 2?"}'
FIELDS = (
    *("role", "content", "tool_calls", "reasoning_content", "reasoning", "thinking"),
    *("name", "tool_call_id", "train", "weight"),
)


def messages_from_json(value: object, where: str) -> tuple[Message, ...]:
    """The messages of a list of JSON objects; `where` names row and field.

    Fields that are null count as absent (Parquet fills them in). Raises `DataError` for what is not
    a conversation.
    """
    if not isinstance(value, list | tuple) or not value:
        raise DataError(
            f"{where} is {short(value)}, expected a non-empty list of messages such as {EXAMPLE}: "
            "correct this row"
        )
    return tuple(_message(item, f"{where}, message {i}") for i, item in enumerate(value))


def _message(value: object, where: str) -> Message:
    if not isinstance(value, Mapping):
        raise DataError(f"{where}, is {short(value)}, expected {EXAMPLE}: correct this row")
    given = {str(name): item for name, item in value.items() if item is not None}
    role = given.get("role")
    if not isinstance(role, str) or role not in ROLES:
        hint = nearest(role, ROLES) if isinstance(role, str) else ""
        raise DataError(
            f"{where}, has the role {short(role)}{hint}, expected system, user, assistant or tool: "
            "correct this row"
        )
    calls = tool_calls_from_json(given.get("tool_calls"), where)
    reasoning = next(
        (given[n] for n in ("reasoning_content", "reasoning", "thinking") if n in given), ""
    )
    content = _text(given.get("content", ""), f"{where}, 'content'")
    if not content and not calls and ROLES[role] != "assistant" and "content" not in given:
        raise DataError(
            f"{where}, has no 'content', only {sorted(given)}, expected {EXAMPLE}: correct this row"
        )
    train = given.get("train", given.get("weight", True))
    if train not in (True, False, 0, 1):
        raise DataError(f"{where}: 'train' is {short(train)}, expected true or false: correct it")
    return Message(
        ROLES[role],
        content,
        calls,
        reasoning=_text(reasoning, f"{where}, 'reasoning_content'"),
        name=str(given.get("name", "")),
        tool_call_id=str(given.get("tool_call_id", "")),
        train=bool(train),
    )


def _text(value: object, where: str) -> str:
    """Text, or text parts joined; anything else (images, audio) is refused."""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        parts = []
        for part in value:
            if isinstance(part, str):
                parts.append(part)
            elif (
                isinstance(part, Mapping)
                and part.get("type", "text") == "text"
                and isinstance(part.get("text"), str)
            ):
                parts.append(part["text"])
            else:
                raise DataError(
                    f"{where} holds {short(part)}, expected text or text parts such as "
                    '{"type": "text", "text": "..."}: this model reads text only'
                )
        return "".join(parts)
    raise DataError(f"{where} is {short(value)}, expected text or a list of text parts: correct it")


def tool_calls_from_json(value: object, where: str) -> tuple[ToolCall, ...]:
    """Calls in the forms of OpenAI ({"function": {name, arguments}}) and plain {name, arguments}.

    `arguments` may be an object or the JSON text of one.
    """
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise DataError(f"{where}: 'tool_calls' is {short(value)}, expected a list: correct it")
    return tuple(_call(item, where) for item in value)


def _call(value: object, where: str) -> ToolCall:
    example = '{"function": {"name": "add", "arguments": {"a": 1}}}'
    inner = value.get("function", value) if isinstance(value, Mapping) else None
    name = inner.get("name") if isinstance(inner, Mapping) else None
    arguments = inner.get("arguments") if isinstance(inner, Mapping) else None
    if isinstance(arguments, str):
        try:
            arguments = loads(arguments) if arguments.strip() else {}
        except NotJson:
            arguments = None
    elif isinstance(inner, Mapping) and arguments is None and "arguments" not in inner:
        arguments = inner.get("parameters", {})
    if not isinstance(name, str) or not name or not isinstance(arguments, Mapping):
        raise DataError(
            f"{where}: a tool call is {short(value)}, expected {example} with arguments that are "
            "an object or its JSON text: correct this row"
        )
    assert isinstance(value, Mapping)
    return ToolCall(name, without_nulls(arguments), str(value.get("id") or ""))


def without_nulls(value: Any) -> Any:  # Any: a JSON value
    """The value without object fields that are null, which columns of Parquet fill in."""
    if isinstance(value, Mapping):
        return {str(k): without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(item) for item in value]
    return value


def tools_from_json(value: object, where: str) -> tuple[ToolSchema, ...]:
    """Tools as a list of JSON schemas, or as the JSON text of one; each in the templates' form."""
    if isinstance(value, str):
        try:
            value = loads(value) if value.strip() else []
        except NotJson as error:
            raise DataError(f"{where} is text but not JSON ({error}): correct it") from error
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise DataError(f"{where} is {short(value)}, expected a list of tools: correct it")
    tools = []
    for item in value:
        inner = item.get("function", item) if isinstance(item, Mapping) else None
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
            raise DataError(
                f"{where} holds {short(item)}, expected "
                '{"type": "function", "function": {"name": ..., "parameters": {...}}}: correct it'
            )
        tools.append({"type": "function", "function": without_nulls(dict(inner))})
    return tuple(tools)


def message_to_json(message: Message) -> Json:
    """The message as chat templates and APIs take it, without what is empty."""
    made: Json = {"role": message.role, "content": message.content}
    if message.reasoning:
        made["reasoning_content"] = message.reasoning
    if message.tool_calls:
        made["tool_calls"] = [
            {
                **({"id": call.id} if call.id else {}),
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.name:
        made["name"] = message.name
    if message.tool_call_id:
        made["tool_call_id"] = message.tool_call_id
    return made


def chat_text(messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> str:
    """What people and keys read: a single user message's content, or a line of each message."""
    if len(messages) == 1 and messages[0].role == "user" and not tools:
        return messages[0].content
    lines = [f"{m.role}: {_said(m)}" for m in messages]
    if tools:
        lines.insert(0, f"tools: {json.dumps(list(tools), sort_keys=True, ensure_ascii=False)}")
    return "\n".join(lines)


def _said(message: Message) -> str:
    calls = [
        f"{call.name}({json.dumps(dict(call.arguments), sort_keys=True, ensure_ascii=False)})"
        for call in message.tool_calls
    ]
    thought = [f"({message.reasoning})"] if message.reasoning else []
    return " ".join(part for part in (*thought, message.content, *calls) if part)


def short(value: object) -> str:
    """A value's start with its type, for messages."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
