"""Formats of SFT data: recognised by their columns, read as people write them, refused by row."""

from __future__ import annotations

import json
from typing import Any

import pytest

from posttrain.core.data.formats import FORMATS, Example, examples, recognise
from posttrain.core.errors import DataError
from posttrain.core.runtime.json_files import JsonRow
from posttrain.core.types import Message, ToolCall

USER, ANSWER = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
ASKED, SAID = Message("user", "2 + 2?"), Message("assistant", "4")
ADD = {"name": "add", "parameters": {"type": "object"}}
SCHEMA = {"type": "function", "function": ADD}
CALL = Message("assistant", tool_calls=(ToolCall("add", {"a": 1}),))


def row(values: dict[str, Any], number: int = 1) -> JsonRow:
    return JsonRow(f"chats.jsonl:{number}", values)


def read(values: dict[str, Any]) -> Example:
    return recognise(row(values)).read(row(values))


@pytest.mark.parametrize(
    ("values", "name", "messages"),
    [
        ({"messages": [USER, ANSWER]}, "messages", (ASKED, SAID)),
        (  # UltraChat and UltraFeedback have more columns than these
            {"messages": [USER, ANSWER], "prompt": "2 + 2?", "chosen": [], "rejected": []},
            "messages",
            (ASKED, SAID),
        ),
        ({"messages": json.dumps([USER, ANSWER])}, "messages", (ASKED, SAID)),  # a cell of a CSV
        (
            {"messages": [USER, ANSWER], "system": "Be brief."},
            "messages",
            (Message("system", "Be brief."), ASKED, SAID),
        ),
        ({"prompt": "2 + 2?", "completion": "4"}, "prompt_completion", (ASKED, SAID)),
        ({"prompt": [USER], "completion": [ANSWER]}, "prompt_completion", (ASKED, SAID)),
        ({"prompt": USER, "completion": ANSWER}, "prompt_completion", (ASKED, SAID)),
        ({"prompt": "2 + 2?", "response": "4"}, "prompt_completion", (ASKED, SAID)),
        (
            {
                "conversations": [
                    {"from": "human", "value": "2 + 2?"},
                    {"from": "gpt", "value": "4"},
                ]
            },
            "sharegpt",
            (ASKED, SAID),
        ),
        ({"conversations": [USER, ANSWER]}, "sharegpt", (ASKED, SAID)),
        (
            {
                "conversations": [
                    {"from": "system", "value": "Be brief."},
                    {"from": "user", "value": "2 + 2?"},
                    {"from": "chatgpt", "value": "4", "weight": 0},
                ],
                "system": "not used, because the turns have one",
            },
            "sharegpt",
            (Message("system", "Be brief."), ASKED, Message("assistant", "4", train=False)),
        ),
        ({"instruction": "2 + 2?", "output": "4"}, "alpaca", (ASKED, SAID)),
        (
            {"instruction": "2 + 2?", "input": " ", "output": "4", "text": "x"},
            "alpaca",
            (ASKED, SAID),
        ),
        (
            {"instruction": "Add", "input": "2 and 2", "output": "4", "history": [["a", "b"]]},
            "alpaca",
            (
                Message("user", "a"),
                Message("assistant", "b"),
                Message("user", "Add\n2 and 2"),
                SAID,
            ),
        ),
        ({"instruction": "2 + 2?", "output": "4", "history": ""}, "alpaca", (ASKED, SAID)),
        (
            {"instruction": "Add", "context": "2 and 2", "response": "4", "category": "sums"},
            "alpaca",
            (Message("user", "Add\n2 and 2"), SAID),
        ),
    ],
)
def test_a_row_is_recognised_by_its_columns(
    values: dict[str, Any], name: str, messages: tuple[Message, ...]
) -> None:
    assert recognise(row(values)).name == name
    assert read(values).messages == messages
    # Parquet fills columns of other rows with null.
    nulls = dict.fromkeys(("messages", "text", "tools", "system", "label", "input", "history"))
    assert read({**nulls, **values}).messages == messages


def test_text_is_learned_as_it_is() -> None:
    assert read({"text": " <s>a\n", "meta": {}}) == Example("chats.jsonl:1", text=" <s>a\n")


def test_what_a_prompt_quotes_is_context() -> None:
    found = read({"prompt": [USER, ANSWER, USER], "completion": [ANSWER], "system": "s"})
    assert [m.role for m in found.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert found.answer == 4


@pytest.mark.parametrize("tools", [[ADD], [SCHEMA], json.dumps([SCHEMA]), [{**SCHEMA, "x": None}]])
def test_tools_and_calls_are_read_in_every_form(tools: Any) -> None:
    openai = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    parquet = {"function": {"name": "add", "arguments": {"a": 1, "b": None}}, "id": None}
    for call in (openai, parquet, {"name": "add", "arguments": {"a": 1}}):
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        result = {"role": "tool", "content": [{"type": "text", "text": "3"}], "tool_call_id": "c1"}
        found = read({"messages": [USER, said, result, ANSWER], "tools": tools})
        assert [dict(tool) for tool in found.tools] == [SCHEMA]
        assert [dict(one.arguments) for one in found.messages[1].tool_calls] == [{"a": 1}]
        assert found.messages[2] == Message("tool", "3", tool_call_id="c1")


def test_function_calls_of_sharegpt_are_one_turn_of_the_assistant() -> None:
    call = {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'}
    turns = [
        {"from": "human", "value": "1 + 1?"},
        {"from": "gpt", "value": "I add."},
        call,
        call,
        {"from": "observation", "value": "2"},
        {"from": "function_call", "value": '[{"name": "add", "arguments": {"a": 1}}]'},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "2"},
    ]
    found = read({"conversations": turns, "tools": json.dumps([ADD]), "system": "s"})
    roles = ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert [message.role for message in found.messages] == roles
    assert found.messages[2] == Message("assistant", "I add.", CALL.tool_calls * 2)
    assert found.messages[4] == CALL
    assert [dict(tool) for tool in found.tools] == [SCHEMA]


@pytest.mark.parametrize(
    ("values", "reported"),
    [
        ({"question": "q", "answer": "a"}, "columns ['answer', 'question']"),
        ({"prompt": "q"}, "rename the columns"),
        ({"messages": None, "text": None}, "columns []"),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "kind preference"),
        ({"prompt": "q", "completion": "a", "label": False}, "labelled answer"),
        ({"messages": []}, "'messages' is [] (list), expected a non-empty list"),
        ({"messages": "hello"}, "'messages' is 'hello' (str)"),
        ({"messages": [{"role": "usr", "content": "q"}]}, "message 0, has the role 'usr'"),
        ({"messages": [{"role": "user", "content": 3}]}, "message 0, 'content' is 3"),
        ({"messages": [{**USER, "train": "no"}]}, "'train' is 'no'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "this model reads text only",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]},
            "a tool call is",
        ),
        ({"messages": [USER, ANSWER], "tools": "{"}, "'tools' is text but not JSON"),
        ({"messages": [USER, ANSWER], "tools": [{"x": 1}]}, "'tools' holds"),
        ({"prompt": " ", "completion": "a"}, "'prompt' is empty"),
        ({"prompt": 3, "completion": "a"}, "'prompt' is 3 (int)"),
        ({"prompt": "q", "completion": {"x": 1}}, "'completion', message 0"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "the role 'alien'"),
        ({"conversations": [{"from": 3, "value": "x"}]}, "'from' is 3"),
        ({"conversations": ["x"]}, "turn 0, message 0"),
        ({"conversations": "x"}, "expected a non-empty list of turns"),
        ({"conversations": [{"from": "function_call", "value": "add(1)"}]}, "is not JSON"),
        ({"conversations": [{"from": "function_call", "value": "3"}]}, "a tool call is 3"),
        ({"instruction": "", "output": "a"}, "'instruction' is ''"),
        ({"instruction": "q", "output": 3}, "'output' is 3"),
        ({"instruction": "q", "output": "a", "history": "x"}, "'history' is 'x'"),
        ({"instruction": "q", "output": "a", "history": [["a"]]}, "'history', entry 0"),
        ({"text": "\n"}, "'text' is '\\n'"),
        ({"text": 3}, "'text' is 3"),
        ({"messages": [USER, ANSWER], "system": 3}, "'system' is 3"),
    ],
)
def test_a_wrong_row_is_refused_by_name(values: dict[str, Any], reported: str) -> None:
    with pytest.raises(DataError) as raised:
        read(values)
    assert str(raised.value).startswith("chats.jsonl:1")
    assert reported in str(raised.value)


def test_one_file_has_one_format() -> None:
    same = [row({"text": "a"}, 1), row({"text": "b", "messages": None}, 2)]
    assert [example.text for _, example in examples(same)] == ["a", "b"]
    mixed = [*same, row({"prompt": "q", "completion": "a"}, 3)]
    with pytest.raises(DataError, match=r"chats.jsonl:1 is of the format text .*chats.jsonl:3"):
        list(examples(mixed))


def test_formats_have_names_of_their_own() -> None:
    assert len({form.name for form in FORMATS}) == len(FORMATS)
