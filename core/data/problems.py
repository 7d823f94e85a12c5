"""Problems as JSON, with their messages and tools, and what identifies their content.

A problem whose prompt is one plain user message is stored and identified by its texts alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.core.types import Message, Problem, ToolCall

Json = dict[str, Any]  # Any: JSON values

FIELDS = frozenset({"key", "prompt", "answer", "worked", "metadata", "messages", "tools"})


def is_plain(problem: Problem) -> bool:
    """Whether the prompt is one user message and nothing else."""
    return problem.messages == (Message("user", problem.prompt),) and not problem.tools


def problem_to_json(problem: Problem) -> Json:
    """All of a problem; `messages` and `tools` only where the prompt is more than text."""
    made: Json = {
        "key": problem.key,
        "prompt": problem.prompt,
        "answer": problem.answer,
        "worked": problem.worked,
        "metadata": dict(problem.metadata),
    }
    if not is_plain(problem):
        made["messages"] = [_stored(message) for message in problem.messages]
        made["tools"] = [dict(tool) for tool in problem.tools]
    return made


def problem_from_json(value: Mapping[str, Any]) -> Problem:
    """What `problem_to_json` was given. Raises `TypeError` or `ValueError` for anything else."""
    texts = {name: value.get(name) for name in ("key", "prompt", "answer", "worked")}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise TypeError(f"'{name}' of a problem is {text!r}, expected text")
    metadata = value.get("metadata", {})
    if not isinstance(metadata, Mapping) or not value.keys() <= FIELDS:
        raise TypeError(f"a problem has the fields {sorted(value)}, expected {sorted(FIELDS)}")
    return Problem(
        **{name: str(text) for name, text in texts.items()},
        metadata={str(name): str(item) for name, item in metadata.items()},
        messages=tuple(_message(item) for item in value.get("messages", ())),
        tools=tuple(dict(tool) for tool in value.get("tools", ())),
    )


def problem_content(problem: Problem) -> list[object]:
    """What makes a problem this problem, for digests; where its row stood is not part of it."""
    content: list[object] = [problem.key, problem.prompt, problem.answer, problem.worked]
    if not is_plain(problem):
        stored = problem_to_json(problem)
        content += [stored["messages"], stored["tools"]]
    return content


def _stored(message: Message) -> Json:
    """The message's fields without those that have their default."""
    made: Json = {"role": message.role, "content": message.content}
    for name in ("reasoning", "name", "tool_call_id"):
        if text := getattr(message, name):
            made[name] = text
    if message.tool_calls:
        made["tool_calls"] = [
            {"name": call.name, "arguments": dict(call.arguments), "id": call.id}
            for call in message.tool_calls
        ]
    if message.malformed:
        made["malformed"] = list(message.malformed)
    return made if message.train else made | {"train": False}


def _message(value: Mapping[str, Any]) -> Message:
    calls = tuple(ToolCall(**call) for call in value.get("tool_calls", ()))
    malformed = tuple(value.get("malformed", ()))
    return Message(**{**value, "tool_calls": calls, "malformed": malformed})
