"""Formats of data for supervised learning, recognised by their columns.

| format | columns |
|---|---|
| `messages` | `messages`, with `tools` and `system` |
| `prompt_completion` | `prompt` and `completion` (or `response`): text or messages, with `tools` |
| `sharegpt` | `conversations`: `from` and `value`, with `system` and `tools` |
| `alpaca` | `instruction` and `output`, with `input`, `system` and `history` |
| `text` | `text`: learned as it is, without a chat template |

Columns that are null count as absent, since Parquet fills them in. Columns that no format reads are
ignored. Importing this module needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from posttrain.core.data.messages import (
    messages_from_json,
    short,
    tool_calls_from_json,
    tools_from_json,
)
from posttrain.core.data.rows import each_row
from posttrain.core.errors import DataError
from posttrain.core.runtime.json_files import JsonRow, NotJson, loads
from posttrain.core.types import Message, ToolSchema


@dataclass(frozen=True, slots=True)
class Example:
    """What one row teaches: a conversation, or else a plain `text`. `where` names the row.

    Messages before number `answer` are a prompt: what an assistant says in them is context.
    """

    where: str
    messages: tuple[Message, ...] = ()
    tools: tuple[ToolSchema, ...] = ()
    text: str = ""
    answer: int = 0


Values = Mapping[str, Any]  # Any: JSON values of a row, without those that are null
Reader = Callable[[str, Values], Example]


@dataclass(frozen=True, slots=True)
class Format:
    """A form of rows. `needs` are sets of columns of which each must have one in the row."""

    name: str
    shape: str
    needs: tuple[frozenset[str], ...]
    reader: Reader

    def fits(self, columns: Iterable[str]) -> bool:
        given = set(columns)
        return all(given & one for one in self.needs)

    def read(self, row: JsonRow) -> Example:
        """The row's example. Raises `DataError` that names row, field and what to change."""
        return self.reader(row.where, present(row.values))


def present(values: Mapping[str, object]) -> Values:
    return {name: value for name, value in values.items() if value is not None}


def recognise(row: JsonRow) -> Format:
    """The format of the row; raises `DataError` for columns that are none."""
    columns = present(row.values)
    if not {"messages", *_CONVERSATIONS} & columns.keys():
        if {"chosen", "rejected"} <= columns.keys():
            raise DataError(
                f"{row.where} holds a preference ('chosen' and 'rejected'), which an sft stage "
                "does not learn: use a stage of kind preference or reward_model"
            )
        if "completion" in columns and isinstance(columns.get("label"), bool):
            raise DataError(
                f"{row.where} holds a labelled answer ('completion' and 'label'), and wrong ones "
                "are not to be imitated: use a stage of kind preference, or remove the wrong rows "
                "and the column 'label'"
            )
    for form in FORMATS:
        if form.fits(columns):
            return form
    known = "; ".join(f"{form.name} {form.shape}" for form in FORMATS)
    raise DataError(
        f"{row.where} has the columns {sorted(columns)}, which are of none of the formats "
        f"{known}: rename the columns"
    )


def examples(rows: Iterable[JsonRow]) -> Iterator[tuple[Format, Example]]:
    """Each row's example with the format, which must be the same in all rows."""
    first: tuple[str, Format] | None = None

    def read(row: JsonRow) -> tuple[Format, Example]:
        nonlocal first
        form = recognise(row)
        first = first or (row.where, form)
        if form is not first[1]:
            raise DataError(
                f"{first[0]} is of the format {first[1].name} {first[1].shape} and {row.where} of "
                f"the format {form.name} {form.shape}, expected one format in all rows: put them "
                "into two files and list both in `data`"
            )
        return form, form.read(row)

    return each_row(rows, read)


# --- readers -------------------------------------------------------------------------------------


def _messages(where: str, values: Values) -> Example:
    found = messages_from_json(parsed_cell(values["messages"]), f"{where}, 'messages'")
    return _example(where, values, found)


def _prompt_completion(where: str, values: Values) -> Example:
    name = "completion" if "completion" in values else "response"
    asked = _side(where, values, "prompt", "user")
    answer = _side(where, values, name, "assistant")
    return _example(where, values, (*asked, *answer), len(asked))


def _side(where: str, values: Values, name: str, role: str) -> tuple[Message, ...]:
    """The messages of a prompt or a completion; text is one message of `role`."""
    value = parsed_cell(values[name])
    if isinstance(value, Mapping):  # one message without its list
        value = [value]
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{where}: '{name}' is empty, expected text: fill it in, or remove it")
        value = [{"role": role, "content": value}]
    return messages_from_json(value, f"{where}, '{name}'")


def _sharegpt(where: str, values: Values) -> Example:
    name = next(name for name in _CONVERSATIONS if name in values)
    return _example(where, values, conversation(values[name], f"{where}, '{name}'"))


def conversation(value: object, place: str) -> tuple[Message, ...]:
    """The messages of a list of turns (`from`, `value`), or of chat messages; `place` names it."""
    turns = parsed_cell(value)
    if not isinstance(turns, list | tuple) or not turns:
        raise DataError(
            f"{place} is {short(turns)}, expected a non-empty list of turns such as {_TURN}: "
            "correct this row"
        )
    found: list[Message] = []
    for number, turn in enumerate(turns):
        message = _turn(turn, f"{place}, turn {number}")
        before = found[-1] if found else None
        if message.tool_calls and before is not None and before.role == "assistant":
            # One turn of the assistant's: what it says and all that it calls.
            found[-1] = replace(
                before,
                content=before.content + message.content,
                tool_calls=before.tool_calls + message.tool_calls,
                train=before.train and message.train,
            )
        else:
            found.append(message)
    return tuple(found)


def _turn(turn: object, where: str) -> Message:
    given = present(turn) if isinstance(turn, Mapping) else {}
    if "from" not in given:
        # Data sets with this column often hold chat messages.
        return messages_from_json([turn], where)[0]
    role, value = given["from"], given.get("value", "")
    rest = {name: item for name, item in given.items() if name not in ("from", "value")}
    if role == "function_call":
        try:
            calls = loads(value) if isinstance(value, str) else value
        except NotJson as error:
            raise DataError(
                f"{where}: the value of function_call is not JSON ({error}), expected "
                '{"name": ..., "arguments": {...}} or a list of these: correct this row'
            ) from error
        calls = calls if isinstance(calls, list) else [calls]
        message = messages_from_json([{**rest, "role": "assistant", "content": ""}], where)[0]
        return replace(message, tool_calls=tool_calls_from_json(calls, where))
    if not isinstance(role, str):
        raise DataError(
            f"{where}: 'from' is {short(role)}, expected text such as human: correct it"
        )
    role = _SPEAKERS.get(role, role)
    return messages_from_json([{**rest, "role": role, "content": value}], where)[0]


def _alpaca(where: str, values: Values) -> Example:
    answer = "output" if "output" in values else "response"
    more = "input" if "input" in values else "context"
    question = _text(where, values, "instruction")
    if str(values.get(more, "")).strip():
        question = f"{question}\n{_text(where, values, more)}"
    chat = [*_history(where, values.get("history", [])), Message("user", question)]
    reply = values[answer]
    if not isinstance(reply, str):
        raise DataError(f"{where}: '{answer}' is {short(reply)}, expected text: correct this row")
    return _example(where, values, (*chat, Message("assistant", reply)))


def _history(where: str, value: Any) -> Iterator[Message]:  # Any: a JSON value
    """Earlier questions and answers, which are learned too."""
    if isinstance(value, str):  # a cell of a CSV file
        try:
            value = loads(value) if value.strip() else []
        except NotJson:
            pass
    if not isinstance(value, list | tuple):
        raise DataError(
            f"{where}: 'history' is {short(value)}, expected a list of [question, answer]: correct "
            "this row"
        )
    for number, pair in enumerate(value):
        if (
            not isinstance(pair, list | tuple)
            or len(pair) != 2
            or not all(isinstance(part, str) for part in pair)
        ):
            raise DataError(
                f"{where}: 'history', entry {number}, is {short(pair)}, expected a question and an "
                "answer, both text: correct this row"
            )
        yield Message("user", pair[0])
        yield Message("assistant", pair[1])


def _plain(where: str, values: Values) -> Example:
    return Example(where, text=_text(where, values, "text"))


def _example(where: str, values: Values, messages: tuple[Message, ...], answer: int = 0) -> Example:
    """The conversation with the row's own `system` and `tools`."""
    if values.get("system") and messages[0].role != "system":
        messages = (Message("system", _text(where, values, "system")), *messages)
        answer += 1 if answer else 0
    tools = tools_from_json(values.get("tools"), f"{where}, 'tools'")
    return Example(where, messages, tools, answer=answer)


def _text(where: str, values: Values, name: str) -> str:
    value = values[name]
    if not isinstance(value, str) or not value.strip():
        raise DataError(
            f"{where}: '{name}' is {short(value)}, expected non-empty text: correct this row"
        )
    return value


def parsed_cell(value: Any, by: tuple[str, ...] = ("role", "from")) -> Any:  # Any: a JSON value
    """The value; a list of messages where it is the JSON text of one, as cells of CSV files are.

    `by` are fields of which a message has one.
    """
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        found = loads(value)
    except NotJson:
        return value
    spoken = isinstance(found, list) and all(
        isinstance(item, dict) and not item.keys().isdisjoint(by) for item in found
    )
    return found if found and spoken else value


_CONVERSATIONS = ("conversations", "conversation")
_SPEAKERS = {"chatgpt": "assistant", "bot": "assistant", "instruction": "user"}
_TURN = '{"from": "human", "value": "2 + 2?"}'

FORMATS: tuple[Format, ...] = (
    Format("messages", '{"messages": [...]}', (frozenset({"messages"}),), _messages),
    Format("sharegpt", '{"conversations": [...]}', (frozenset(_CONVERSATIONS),), _sharegpt),
    Format(
        "prompt_completion",
        '{"prompt": ..., "completion": ...}',
        (frozenset({"prompt"}), frozenset({"completion", "response"})),
        _prompt_completion,
    ),
    Format(
        "alpaca",
        '{"instruction": ..., "input": ..., "output": ...}',
        (frozenset({"instruction"}), frozenset({"output", "response"})),
        _alpaca,
    ),
    Format("text", '{"text": ...}', (frozenset({"text"}),), _plain),
)
"""In this order: a row that fits several is of the first."""
