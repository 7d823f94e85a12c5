"""Arguments without quotes, read by the schemas of the tools."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.data.tool_arguments import ArgumentSchemas
from posttrain.core.data.tool_calls import parse_assistant, write_tool_calls
from posttrain.core.types import Message, ToolCall

Json = dict[str, Any]  # Any: JSON


def tool(properties: Json, **more: Any) -> Json:
    parameters = {"type": "object", "properties": properties, **more}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def read(schema: Any, text: str, **more: Any) -> str:
    """The value as JSON, in which 1, 1.0, true and "1" are different."""
    return json.dumps(ArgumentSchemas([tool({"x": schema}, **more)]).value("f", "x", text))


STRING = {"type": "string"}
LIKE_VALUES = (
    "5",
    "1e3",
    "007",
    "true",
    "null",
    "[1]",
    '{"a": 1}',
    '"x"',
    "2024-01-05",
    "",
    " 5\n",
)


@pytest.mark.parametrize("text", LIKE_VALUES)
@pytest.mark.parametrize(
    "schema",
    [
        STRING,
        {"type": ["string"]},
        {"type": "str"},  # as in data sets of functions of Python
        {"enum": ["5", "1e3"]},
        {"const": "5"},
        {"allOf": [{"type": ["string", "integer"]}, STRING]},
        {"anyOf": [STRING, {"enum": ["a"]}]},
        {"$ref": "#/$defs/Code"},
    ],
)
def test_a_string_is_the_text_as_it_is(schema: Json, text: str) -> None:
    code = {"Code": {"title": "Code", "type": "string", "enum": ["a"]}}
    assert read(schema, text, **{"$defs": code}) == json.dumps(text)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, "5", "5"),
        ({"type": "integer"}, " 5\n", "5"),
        ({"type": "number"}, "5", "5"),
        ({"type": "number"}, "1e3", "1000.0"),
        ({"type": "boolean"}, "true", "true"),
        ({"type": "boolean"}, "False", "false"),
        ({"type": "null"}, "null", "null"),
        ({"type": "array", "items": STRING}, '["5", 5]', '["5", 5]'),
        ({"type": "object"}, '{"a": "5"}', '{"a": "5"}'),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": ["string", "null"]}, "5", '"5"'),
        ({"type": "string", "nullable": True}, "null", "null"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", "null"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", "null"),
        ({"oneOf": [{"type": "integer"}, STRING]}, "5", "5"),
        ({"oneOf": [{"type": "integer"}, STRING]}, "true", '"true"'),
        ({"oneOf": [{"type": "boolean"}, STRING]}, "5", '"5"'),
        ({"enum": [1, "auto"]}, "1", "1"),
        ({"enum": [1, "auto"]}, "auto", '"auto"'),
        ({"enum": [2, "1"]}, "1", '"1"'),
        ({"enum": [1.5, 2]}, "2", "2"),
    ],
)
def test_other_types_are_json_and_a_union_takes_the_first_that_fits(
    schema: Json, text: str, value: str
) -> None:
    assert read(schema, text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", "5"),
        ("true", "true"),
        ("null", "null"),
        ("[1]", "[1]"),
        ("a b", '"a b"'),
        ("007", '"007"'),
        ("None", '"None"'),
        ('"x"', json.dumps('"x"')),
        ("NaN", '"NaN"'),
    ],
)
@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        {"description": "any"},
        {"type": "any"},
        {"$ref": "#/nowhere"},
        {"anyOf": [{}, STRING]},
    ]
    + [{"type": [1]}, {"enum": 5}, {"allOf": 5}, {"$ref": "#/properties/x"}],
)
def test_without_a_type_any_json_but_a_string_is_its_value(
    schema: Any, text: str, value: str
) -> None:
    assert read(schema, text) == value
    schemas = ArgumentSchemas([tool({"x": STRING})])
    assert json.dumps(schemas.value("f", "unknown", text)) == value
    assert json.dumps(schemas.value("unknown", "x", text)) == value


def test_what_does_not_fit_its_schema_reaches_the_tool_which_refuses_it() -> None:
    assert read({"type": "integer"}, "five") == '"five"'
    assert read({"type": "integer"}, "007") == '"007"'
    assert read({"type": "integer"}, "5.5") == "5.5"
    assert read({"type": "array"}, "5") == "5"


def test_arguments_beyond_the_named_ones_have_their_own_schema() -> None:
    schemas = ArgumentSchemas([tool({}, additionalProperties=STRING)])
    assert schemas.value("f", "anything", "5") == "5"


def test_the_last_of_two_tools_of_one_name_counts() -> None:
    number = tool({"x": {"type": "integer"}})
    assert ArgumentSchemas([number, tool({"x": STRING})]).value("f", "x", "5") == "5"


# What would end a value, or begin the next one.
PIECES = {
    "glm": ("</arg_value>", "<arg_value>", "<arg_key>", "</tool_call>"),
    "qwen_xml": ("</parameter>", "<parameter=", "<function=", "</function>", "</tool_call>"),
}
FORMS = tuple(PIECES)
plain = st.text(max_size=8) | st.sampled_from(LIKE_VALUES)
numbers = st.integers(-(10**9), 10**9) | st.floats(-1e9, 1e9)
values = st.fixed_dictionaries(
    {},
    optional={
        "s": plain,
        "i": st.integers(-(10**9), 10**9),
        "n": numbers,
        "b": st.booleans(),
        "z": st.none(),
        "l": st.lists(plain | numbers | st.none(), max_size=3),
        "o": st.dictionaries(plain, plain | st.booleans(), max_size=3),
        "m": st.none() | st.integers() | st.booleans(),
    },
)
TYPED = tool(
    {
        **{"s": STRING, "i": {"type": "integer"}, "n": {"type": "number"}},
        **{"b": {"type": "boolean"}, "z": {"type": "null"}, "l": {"type": "array"}},
        **{"o": {"type": "object"}, "m": {"type": ["null", "integer", "boolean"]}},
    }
)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=200, deadline=None)
@given(arguments=values)
def test_what_is_written_is_read_with_its_types(form: str, arguments: Json) -> None:
    call = ToolCall("f", arguments)
    (found,) = parse_assistant(write_tool_calls([call], form), form, tools=[TYPED]).tool_calls
    assert json.dumps(found.arguments) == json.dumps(arguments)


@pytest.mark.parametrize(
    ("form", "text"), [(form, f"a {piece} b") for form, own in PIECES.items() for piece in own]
)
def test_a_piece_of_the_format_in_a_string_is_its_text_or_makes_the_call_malformed(
    form: str, text: str
) -> None:
    begins = ("<arg_value>", "<arg_key>", "<parameter=", "<function=")
    written = write_tool_calls([ToolCall("f", {"s": text, "i": 1})], form)
    found = parse_assistant(written, form, tools=[TYPED])
    if any(piece in text for piece in begins):
        assert not found.tool_calls and found.malformed
    else:
        assert found == Message("assistant", tool_calls=(ToolCall("f", {"s": text, "i": 1}),))
