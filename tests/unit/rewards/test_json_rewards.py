"""The rewards `"json_schema"` and `"tool_call"`: strict JSON, held against schemas."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from posttrain.core.errors import ConfigError
from posttrain.core.runtime.json_files import NotJson, loads
from posttrain.core.types import Score
from tests.helpers.judge_server import judge_server
from tests.helpers.rewards import sample, score

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "name": {"type": "string", "pattern": "^[a-z]+$"}},
    "required": ["x"],
    "additionalProperties": False,
}


def fits(text: str, **fields: object) -> Score:
    return score("json_schema", sample(text), **({"must_fit": POINT} | fields))


@pytest.mark.parametrize(
    ("text", "value", "parsed"),
    [
        ('{"x": 1}', 1, 1),
        (' {"x": 1, "name": "ab"}\n', 1, 1),
        ('{"x": 1.5}', 0, 1),
        ('{"name": "ab"}', 0, 1),
        ('{"x": 1, "y": 2}', 0, 1),
        ('{"x": 1, "name": "AB"}', 0, 1),
        ("[]", 0, 1),
        ("null", 0, 1),
        # Not JSON, however near it is: nothing is repaired.
        ('{"x": 1,}', 0, 0),
        ("{'x': 1}", 0, 0),
        ('{"x": 1', 0, 0),
        ('{"x": 1} done', 0, 0),
        ('{"x": NaN}', 0, 0),
        ('{"x": 1e999}', 0, 0),
        ('{"x": 1, "x": 2}', 0, 0),
        ('```json\n{"x": 1}\n```', 0, 0),
        ("", 0, 0),
        ("\x00", 0, 0),
    ],
)
def test_json_fits_its_schema_or_not(text: str, value: float, parsed: float) -> None:
    found = fits(text)
    assert (found.value, found.status) == (value, "ok")
    assert found.components == {"parsed": parsed, "fits": value}
    assert bool(found.detail) is (value == 0)


def test_what_is_wrong_is_said_with_its_place() -> None:
    assert fits('{"x": "1"}').detail == "$.x: '1' is not of type 'integer'"
    assert fits('{"x": 1, "x": 2}').detail == "not JSON: the key 'x' is written twice in an object"


def test_deep_and_huge_texts_are_refused_without_an_error() -> None:
    for text in ("[" * 100_000, "[" * 300 + "]" * 300, "9" * 10_000, '{"a":' * 50_000):
        assert score("json_schema", sample(text)).value == 0.0
    assert loads("[" * 200 + "]" * 200)
    with pytest.raises(NotJson, match="nested"):
        loads("[" * 202 + "]" * 202)
    assert score("json_schema", sample("[" + "1," * 100_000 + "1]")).value == 1.0


@pytest.mark.parametrize(
    "text",
    ['```JSON\n{"x": 1}\n```', '```json\r\n{"x": 1}\r\n```', '- a:\n  ```json\n  {"x": 1}\n  ```'],
)
def test_a_fence_may_be_indented_in_capitals_and_end_in_crlf(text: str) -> None:
    assert fits(text, fenced="required").value == 1.0


def test_a_fenced_block_is_read_where_that_is_allowed() -> None:
    block = '```json\n{"x": 1}\n```'
    for text, allowed, required in (
        (block, 1, 1),
        (f"Here:\n{block}\nDone.", 1, 1),
        ('{"x": 1}', 1, 0),
        (f"{block}\n{block}", 0, 0),  # which one?
    ):
        assert fits(text, fenced="allowed").value == allowed
        assert fits(text, fenced="required").value == required


def test_a_problem_may_bring_its_schema_and_a_wrong_one_is_an_error() -> None:
    def own(schema: str) -> Score:
        return score("json_schema", sample("1", metadata={"s": schema}), metadata_key="s")

    assert own('{"type": "integer"}').value == 1.0 and own('{"type": "string"}').value == 0.0
    wrong = ['{"type": 5}', "not json", "[]", '{"$ref": "#/no"}', '{"$ref": "http://127.0.0.1:9/"}']
    for schema in wrong:
        assert (own(schema).value, own(schema).status) == (None, "error"), schema
    found = score(
        "json_schema", sample('"a"', metadata={"s": '{"pattern": "("}'}), metadata_key="s"
    )
    assert (found.value, found.status) == (None, "error")
    assert score("json_schema", sample("1"), metadata_key="s").value == 1.0  # the problem has none


def test_a_reference_in_a_schema_is_never_fetched() -> None:
    with judge_server() as server:
        schema = json.dumps({"$ref": server.url})
        found = score("json_schema", sample("1", metadata={"s": schema}), metadata_key="s")
        assert (found.value, found.status) == (None, "error") and server.requests == []


def test_a_wrong_schema_in_the_config_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a JSON schema: 5 is not valid"):
        fits("1", must_fit={"type": 5})


# --- tool calls -------------------------------------------------------------------------------

ADD = {
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
TOOLS = [{"type": "function", "function": ADD}, {"name": "now"}]


def call(name: str, arguments: Any) -> str:  # Any: JSON
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


GOOD = call("add", {"a": 1, "b": 2})


@pytest.mark.parametrize(
    ("text", "parsed", "known", "valid"),
    [
        (GOOD, 1, 1, 1),
        ("<think>hm</think>" + GOOD + call("now", {}), 1, 1, 1),
        ('<tool_call>{"name": "now"}</tool_call>', 1, 1, 1),
        (GOOD + call("sub", {"a": 1, "b": 2}), 1, 0.5, 0.5),
        (call("add", {"a": 1}), 1, 1, 0),
        (call("add", {"a": "1", "b": 2}), 1, 1, 0),
        (call("add", '{"a": 1, "b": 2}'), 1, 1, 0),  # text, not an object
        ('<tool_call>{"name": "now", "why": 1}</tool_call>', 1, 1, 0),
        ("<tool_call>add(1, 2)</tool_call>", 0, 0, 0),
        ("<tool_call>[1]</tool_call>", 0, 0, 0),
        ('<tool_call>{"name": 5}</tool_call>', 0, 0, 0),
        (GOOD + "<tool_call>", 0.5, 0.5, 0.5),  # never closed
        ("<tool_call>" + GOOD, 0.5, 0.5, 0.5),  # one begun inside another
        (GOOD.removesuffix("</tool_call>"), 0, 0, 0),
    ],
)
def test_calls_are_counted_by_how_far_they_come(
    text: str, parsed: float, known: float, valid: float
) -> None:
    found = score("tool_call", sample(text), tools=TOOLS)
    assert found.components == {"parsed": parsed, "known": known, "valid": valid}
    assert found.value == valid and bool(found.detail) is (valid < 1)


def test_calls_of_every_turn_count_and_none_that_a_tool_wrote() -> None:
    wrong = call("add", {"a": 1})
    turns = replace(
        sample("so 3"), turns=(GOOD, wrong, "so 3"), transcript=f"{GOOD}[{GOOD}]{wrong}[no]so 3"
    )
    assert score("tool_call", turns, tools=TOOLS).value == 0.5


def test_a_response_without_a_call_is_what_the_config_says() -> None:
    for text in ("", "add(1, 2)", "</tool_call>"):
        assert score("tool_call", sample(text), tools=TOOLS) == Score(
            None, "unscored", "no tool call"
        )
        assert score("tool_call", sample(text), tools=TOOLS, no_calls=0.0).value == 0.0
        assert score("tool_call", sample(text), tools=TOOLS, no_calls=1.0).status == "ok"


def test_a_problem_may_bring_its_tools_and_wrong_ones_are_an_error() -> None:
    own = sample(GOOD, metadata={"tools": json.dumps([ADD])})
    assert score("tool_call", own, metadata_key="tools").value == 1.0
    assert score("tool_call", own).value == 0.0  # the config has no tools
    for tools in ("[5]", "{", '[{"name": "add", "parameters": {"type": 5}}]'):
        found = score("tool_call", sample(GOOD, metadata={"t": tools}), metadata_key="t")
        assert (found.value, found.status) == (None, "error"), tools


def test_wrong_tools_in_the_config_are_refused() -> None:
    with pytest.raises(ConfigError, match="a tool is an object with a name"):
        score("tool_call", sample(), tools=[{"parameters": {}}])
