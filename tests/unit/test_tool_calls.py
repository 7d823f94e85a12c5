"""Tool calls and reasoning in the forms that families of models write, and back again."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.data.tool_calls import (
    TOOL_CALL_FORMS,
    parse_assistant,
    tool_call_form,
    write_tool_calls,
)
from posttrain.core.types import Message, ToolCall

FORMS = [form for form in TOOL_CALL_FORMS if form != "none"]
# These write the values of arguments without JSON quotes.
BARE = ("glm", "qwen_xml")

MARKS = (
    *(
        "<think>",
        "</think>",
        "[THINK]",
        "[/THINK]",
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
    ),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<function=", "</function>", "<parameter=", ">", ";"),
    *("</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "add", "[", "]"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    *("<｜tool▁calls▁end｜>", "function", "```json", "```", "\n", " ", "{", "}", '"', "\\ud800"),
    *(
        '{"name": "add", "arguments": {"a": 1}}',
        '{"name": "add", "parameters": {}}',
        "[[[[",
        "1e999",
    ),
)
texts = st.lists(st.sampled_from(MARKS) | st.text(max_size=5), max_size=25).map("".join)

names = st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e9, 1e9) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
calls = st.builds(ToolCall, names, st.dictionaries(names, json_values, max_size=3))


@pytest.mark.parametrize("form", TOOL_CALL_FORMS)
@settings(max_examples=100, deadline=None)
@given(text=texts, opened=st.booleans())
def test_any_text_is_read_without_an_error(form: str, text: str, opened: bool) -> None:
    found = parse_assistant(text, form, opened=opened)
    assert found.role == "assistant"
    for call in found.tool_calls:
        assert call.name and isinstance(call.arguments, dict)
        if form != "none":
            write_tool_calls((call,), form).encode()


@pytest.mark.parametrize("form", [form for form in FORMS if form not in BARE])
@settings(max_examples=60, deadline=None)
@given(made=st.lists(calls, min_size=1, max_size=3))
def test_calls_survive_whatever_tags_their_arguments_hold(form: str, made: list[ToolCall]) -> None:
    found = parse_assistant(write_tool_calls(made, form), form)
    assert (list(found.tool_calls), found.malformed, found.content) == (made, (), "")


@pytest.mark.parametrize("form", BARE)
def test_values_without_quotes_keep_their_types_as_the_schema_says(form: str) -> None:
    arguments: dict[str, Any] = {"n": 5, "s": "5", "t": "a\nb </tool_call> c", "o": {"x": [None]}}
    schema = {"properties": {"s": {"type": "string"}, "t": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    text = write_tool_calls((ToolCall("f", arguments),), form)
    assert parse_assistant(text, form, tools=tools).tool_calls[0].arguments == arguments
    assert parse_assistant(text, form).tool_calls[0].arguments == arguments | {"s": 5}


# The texts are as the families' own documentation shows them.
SHOWN = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "qwen_xml": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n"
    "</tool_call>",
    "llama3": '{"name": "add", "parameters": {"a": 1}}',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]',
    "mistral_args": '[TOOL_CALLS]add[ARGS]{"a": 1}',
    "glm": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
}
ADD = ToolCall("add", {"a": 1})


@pytest.mark.parametrize("form", FORMS)
def test_a_call_is_written_as_the_family_writes_it(form: str) -> None:
    assert write_tool_calls((ADD,), form) == SHOWN[form]
    assert parse_assistant(SHOWN[form], form) == Message("assistant", tool_calls=(ADD,))
    assert write_tool_calls((), form) == ""


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'),
        ("hermes", SHOWN["qwen_xml"]),
        ("llama3", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}'),
        ("llama3", '{"name": "add", "arguments": {"a": 1}}'),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]'),
        ("mistral", SHOWN["mistral_args"]),
        ("mistral_args", SHOWN["mistral"]),
        ("glm", "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"),
        ("deepseek", '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'),
    ],
)
def test_variants_of_a_form_are_read(form: str, text: str) -> None:
    assert parse_assistant(text, form) == Message("assistant", tool_calls=(ADD,))


@pytest.mark.parametrize("form", FORMS)
def test_content_stands_before_calls_and_reasoning_before_both(form: str) -> None:
    between = {"llama3": "<|python_tag|>", "deepseek": ""}.get(form, "\n")
    between = "" if form.startswith("mistral") else between
    text = f"<think>\nHm.\n</think>\n\nI add.{between}{SHOWN[form]}"
    want = Message("assistant", "I add.", (ADD,), reasoning="Hm.")
    assert parse_assistant(text, form) == want


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nA\n</think>\n\nB", "A", "B"),
        ("\n<think>A</think>B", "A", "B"),
        ("A\n</think>\n\nB", "A", "B"),  # the prompt opened it
        ("<think>\nA", "A", ""),
        ("<think>\n\n</think>\n\nB", "", "B"),
        ("[THINK]A[/THINK]B", "A", "B"),
        ("B", "", "B"),
        ("B <think> A </think>", "", "B <think> A </think>"),
        ("\nB \n", "", "\nB \n"),
    ],
)
def test_reasoning_is_kept_apart_from_the_content(text: str, reasoning: str, content: str) -> None:
    found = parse_assistant(text, "hermes")
    assert (found.reasoning, found.content) == (reasoning, content)


def test_a_text_after_an_opened_reasoning_is_reasoning_until_it_is_closed() -> None:
    assert parse_assistant("A", "none", opened=True) == Message("assistant", reasoning="A")
    assert parse_assistant("A</think>B", "none", opened=True).content == "B"


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "<tool_call>\n{'name': 'add'}\n</tool_call>"),
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}'),
        ("hermes", '<tool_call>{"name": "add", "arguments": "a = 1"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>'),
        ("hermes", "<tool_call>add(1, 2)</tool_call>"),
        ("qwen_xml", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</function>\n</tool_call>"),
        ("llama3", '{"name": "add", "parameters": {"a": 1'),
        ("llama3", "<|python_tag|>print(1)"),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}'),
        ("mistral_args", "[TOOL_CALLS]add[ARGS]{"),
        ("glm", "<tool_call>add\n<arg_key>a</arg_key>\n</tool_call>"),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n{}<｜tool▁call▁end｜>"),
        ("deepseek", "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{<｜tool▁call▁end｜>"),
        ("deepseek", "<｜tool▁calls▁begin｜>add"),
    ],
)
def test_a_call_that_cannot_be_read_is_kept_as_malformed(form: str, text: str) -> None:
    content = "" if form == "llama3" else "Hm."  # Llama's calls stand alone
    assert parse_assistant(content + text, form) == Message("assistant", content, malformed=(text,))


def test_a_malformed_call_costs_only_itself() -> None:
    text = f"<tool_call>{{'bad'</tool_call>\n{SHOWN['hermes']}\n<tool_call>{{"
    found = parse_assistant(text, "hermes")
    assert found.tool_calls == (ADD,)
    assert found.malformed == ("<tool_call>{'bad'</tool_call>", "<tool_call>{")


@pytest.mark.parametrize("text", ['{"answer": 4}', '{"name": "Ada"}', "{x}", "[1, 2]"])
def test_an_answer_that_is_json_is_not_a_call(text: str) -> None:
    assert parse_assistant(text, "llama3") == Message("assistant", text)


@pytest.mark.parametrize("form", FORMS)
def test_the_form_is_guessed_from_the_template(form: str) -> None:
    template = "{% for call in message.tool_calls %}" + SHOWN[form] + "{% endfor %}"
    assert tool_call_form(template) == form


def test_a_template_without_calls_has_the_form_none() -> None:
    assert tool_call_form("<|im_start|>{{ messages[0].content }}") == "none"
    with pytest.raises(ValueError, match="'none'"):
        write_tool_calls((ADD,), "none")
    with pytest.raises(ValueError, match="hermess"):
        parse_assistant("", "hermess")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("form", TOOL_CALL_FORMS)
def test_long_repetitions_are_read_in_linear_time(form: str) -> None:
    # Degenerate output of models; reading it in quadratic time takes minutes.
    for first in MARKS:
        for repeated in (" ", "\n", "{", "<tool_call>", "<｜tool▁call▁begin｜>", "[TOOL_CALLS]"):
            found = parse_assistant(first + repeated * (30_000 // len(repeated)), form)
            assert found.role == "assistant"
