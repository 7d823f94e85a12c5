"""Preferences as messages: a prompt with two answers, or with one answer and a label.

Importing this module needs no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from posttrain.core.math.splits import text_key
from posttrain.core.types import Message, ToolSchema

Kind = Literal["pairs", "labels", "completions"]
Answer = tuple[Message, ...]
"""What follows the prompt: one assistant's message, or several turns that begin with one."""


@dataclass(frozen=True, slots=True)
class PreferenceRow:
    """A prompt and its `answers`, with the `tools` that both may call.

    A pair has two answers, chosen first, and may have a `margin`; any other row has one. `key` is
    the same for the same prompt, as a text or as a chat. `where` names the row for people.
    """

    where: str
    prompt: tuple[Message, ...]
    answers: tuple[Answer, ...]
    margin: float = 0.0
    label: bool | None = None
    tools: tuple[ToolSchema, ...] = ()

    @classmethod
    def of_texts(
        cls, where: str, prompt: str, *answers: str, margin: float = 0.0, label: bool | None = None
    ) -> PreferenceRow:
        """A row whose prompt is one user message and whose answers are plain texts."""
        said = tuple((Message("assistant", text),) for text in answers)
        return cls(where, (Message("user", prompt),), said, margin, label)

    @property
    def key(self) -> str:
        lines = [f"{m.role}: {m.content if is_plain(m) else _json(m)}" for m in self.prompt]
        if self.tools:
            lines.insert(0, f"tools: {json.dumps(list(self.tools), sort_keys=True)}")
        return text_key("\n".join(lines))

    def texts(self) -> tuple[str, ...]:
        """The answers for tables and comparisons; calls and further turns as JSON."""
        return tuple(answer_text(answer) for answer in self.answers)


def is_plain(message: Message) -> bool:
    """Whether a message says nothing but its content, and is learned from."""
    return message == Message(message.role, message.content)


def answer_text(answer: Answer) -> str:
    """The content of a plain answer; anything more as JSON, so that different answers differ."""
    if len(answer) == 1 and is_plain(answer[0]):
        return answer[0].content
    return "\n".join(_json(message) for message in answer)


def _json(message: Message) -> str:
    """What is set in the message, as JSON with sorted keys."""
    empty: dict[str, Any] = asdict(Message(message.role))  # Any: JSON values
    given = {k: v for k, v in asdict(message).items() if k == "role" or v != empty[k]}
    return json.dumps(given, sort_keys=True, ensure_ascii=False)


def preference_digest(rows: Sequence[PreferenceRow]) -> str:
    """Of all that is learned from; rows of plain texts have the digest of those texts."""
    values = []
    for row in rows:
        prompt = [
            {"role": m.role, "content": m.content} if is_plain(m) else _json(m) for m in row.prompt
        ]
        value: list[object] = [prompt, row.texts(), row.margin, row.label]
        values.append([*value, list(row.tools)] if row.tools else value)
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()
