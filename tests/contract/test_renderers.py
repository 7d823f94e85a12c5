"""What every renderer promises, for each family's tokens, and each family's own chat template."""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from posttrain.core.contracts import CONTRACTS, Renderer
from posttrain.core.data.messages import message_to_json
from posttrain.core.data.template import TemplateConfig, TemplateRenderer
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.data.tool_calls import json_text
from posttrain.core.data.turns import FAMILIES as KNOWN
from posttrain.core.errors import ConfigError, DataError
from posttrain.core.kit.checks import Check, Subject, checks_of
from posttrain.core.kit.renderers import (
    CALL,
    LIKE_VALUES,
    NOTE,
    NOTED,
    ODD,
    TEXTS,
    TOOLS,
    changed,
    continued,
    conversations,
    turn_of,
    without_ids,
)
from posttrain.core.types import Message
from tests.helpers.plugins import MANAGER
from tests.helpers.renderers import CHATS, FAMILIES, WITH_CALLS, said, tokenizer_of
from tests.helpers.templates import QWEN_CODER

every_family = pytest.mark.parametrize("family", FAMILIES)


def renderer_of(family: str, **fields: object) -> Renderer[Any]:
    made: Renderer[Any] = MANAGER.build(
        CONTRACTS["renderer"], FAMILIES[family].renderer, dict(fields)
    )
    made.setup(tokenizer_of(family), ())
    return made


def subject_of(family: str) -> Subject:
    entry = MANAGER.find("renderer", FAMILIES[family].renderer)
    return Subject(entry, MANAGER, {}, tokenizer_of(family), FAMILIES[family].tags)


PROMISES = [check for check in checks_of("renderer") if check.kinds]


@pytest.mark.parametrize("check", PROMISES, ids=lambda check: check.name)
@every_family
def test_a_familys_renderer_keeps_what_renderers_promise(family: str, check: Check) -> None:
    check.function(subject_of(family))


def test_every_renderer_has_a_family_here() -> None:
    names = {entry.name for entry in MANAGER.entries("renderer")} - {"chat_template"}
    assert names == {family.renderer for family in FAMILIES.values()} == set(KNOWN)


# --- the family's own template ------------------------------------------------------------------

# Where the own template cannot be followed, and why.
REMOVES_REASONING = "the template leaves reasoning out"
DIFFERENT: dict[str, dict[str, str]] = {
    "qwen2_5": {"reasoning": REMOVES_REASONING},
    "smollm2": {"reasoning": REMOVES_REASONING} | dict.fromkeys(WITH_CALLS, "has no calls"),
    "qwen3": dict.fromkeys(
        {"several", *WITH_CALLS}, "removes the empty block of reasoning when a turn follows"
    ),
    "llama3": {"reasoning": REMOVES_REASONING} | dict.fromkeys(WITH_CALLS, "has no calls"),
    "llama3_1": {
        "reasoning": REMOVES_REASONING,
        "content and call": "leaves the content out",
        "two calls": "refuses two calls",
    },
    "mistral_v3": {"reasoning": REMOVES_REASONING},
    "mistral_v7": {"reasoning": REMOVES_REASONING},
    "mistral_v11": {"reasoning": REMOVES_REASONING},
    "gemma": {"reasoning": REMOVES_REASONING},
    "deepseek_v3": {"reasoning": REMOVES_REASONING} | dict.fromkeys(WITH_CALLS, "has no tools"),
    "deepseek_r1": dict.fromkeys(
        CHATS, "removes the block of reasoning that its own generation prompt begins"
    ),
    "phi3": {"reasoning": REMOVES_REASONING},
    "phi4": {"reasoning": REMOVES_REASONING},
    "phi4_mini": {"reasoning": REMOVES_REASONING},
}
# What a finished conversation has more or less than the template writes.
LAST = {"glm4": ("<|user|>", ""), "phi3": ("", "<|endoftext|>"), "phi4_mini": ("", "<|endoftext|>")}


def by_template(family: str, messages: Sequence[Message], *, generation_prompt: bool) -> list[int]:
    tokenizer = tokenizer_of(family)
    tools = list(TOOLS) if any(m.tool_calls for m in messages) else None
    ids: list[int] = tokenizer.apply_chat_template(
        [message_to_json(m) for m in messages],
        tools=tools,
        add_generation_prompt=generation_prompt,
        return_dict=False,
    )
    return ids


WITH_TOOLS = [name for name in FAMILIES if name not in ("gemma", "phi3", "phi4", "phi4_mini")]
SAME = [
    (family, chat)
    for family in FAMILIES
    for chat in CHATS
    if chat not in DIFFERENT.get(family, {}) and (family in WITH_TOOLS or chat not in WITH_CALLS)
]


@pytest.mark.parametrize(("family", "chat"), SAME)
def test_the_tokens_are_those_of_the_own_template(family: str, chat: str) -> None:
    renderer = renderer_of(family)
    tools = TOOLS if chat in WITH_CALLS else ()
    tokenizer, messages = tokenizer_of(family), CHATS[chat]
    want = by_template(family, messages, generation_prompt=False)
    more, less = LAST.get(family, ("", ""))
    if less:
        assert want.pop() == tokenizer.convert_tokens_to_ids(less)
    if more:
        want.append(tokenizer.convert_tokens_to_ids(more))
    assert list(renderer.render(messages, tools).token_ids) == want
    want = by_template(family, messages[:-1], generation_prompt=True)
    got = renderer.render(messages[:-1], tools, generation_prompt=True)
    assert list(got.token_ids) == want == list(renderer.prompt(messages[:-1], tools))


def template_renderer_of(family: str) -> Renderer[Any]:
    made: Renderer[Any] = MANAGER.build(CONTRACTS["renderer"], "chat_template", {})
    made.setup(tokenizer_of(family), renderer_of(family).end_token_ids)
    return made


@pytest.mark.parametrize(("family", "chat"), SAME)
def test_the_renderer_of_templates_finds_the_same_turns(family: str, chat: str) -> None:
    messages, tools = CHATS[chat], TOOLS if chat in WITH_CALLS else ()
    exact, found = (
        renderer.render(messages, tools)
        for renderer in (renderer_of(family), template_renderer_of(family))
    )
    for i, message in enumerate(messages):
        want = turn_of(exact, i)
        # What ends a turn of GLM's begins the next one, as a template has it.
        assert turn_of(found, i) == (want[:-1] if family == "glm4" else want)
        if want:
            assert without_ids(template_renderer_of(family).parse(want)) == without_ids(message)


@pytest.mark.parametrize("chat", ["single", "system", "unicode", "blanks"])
def test_a_prompt_of_deepseek_r1_begins_the_reasoning_as_its_template_does(chat: str) -> None:
    prompt = CHATS[chat][:-1]
    want = by_template("deepseek_r1", prompt, generation_prompt=True)
    got = renderer_of("deepseek_r1").render(prompt, generation_prompt=True)
    assert list(got.token_ids) == want


def test_qwen3_without_empty_blocks_writes_prompts_as_its_template_does() -> None:
    renderer = renderer_of("qwen3", think="given")
    for chat in ("several", *WITH_CALLS):
        tools = TOOLS if chat in WITH_CALLS else ()
        prompt = CHATS[chat][:-1]
        tokens = renderer.render(prompt, tools, generation_prompt=True).token_ids
        assert list(tokens) == by_template("qwen3", prompt, generation_prompt=True)


# --- round trips --------------------------------------------------------------------------------


# Templates without calls, and one whose generation prompt is not what its turns begin with.
WITHOUT_CALLS = ("smollm2", "llama3", "deepseek_r1")


@pytest.mark.parametrize(
    "family", [*(f for f in WITH_TOOLS if f not in WITHOUT_CALLS), "qwen_coder"]
)
def test_arguments_keep_their_types_by_the_template_too(family: str) -> None:
    """Also the types that Qwen3-Coder's template writes as Python does: True, None."""
    tokenizer = tokenizer_of("qwen3" if family == "qwen_coder" else family)
    if family == "qwen_coder":
        tokenizer = deepcopy(tokenizer)
        tokenizer.chat_template = QWEN_CODER
    renderer = TemplateRenderer(TemplateConfig())
    renderer.setup(tokenizer, ())
    shown = [NOTE] if renderer.facts.shows("tools") else []
    for text in LIKE_VALUES:
        call = replace(CALL, name="note", arguments={"text": text, **NOTED})
        chat = [Message("user", "Q"), Message("assistant", "", (call,))]
        turn = turn_of(renderer.render(chat, shown), 1)
        found = renderer.parse_turn(turn, [NOTE])
        assert [json_text(c.arguments) for c in found.tool_calls] == [json_text(call.arguments)]
        assert not found.content and not found.malformed


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_malformed_calls_are_written_as_they_were_read(family: str) -> None:
    renderer = renderer_of(family)
    broken = {
        "hermes": "<tool_call>{'a'</tool_call>",
        "llama3": '<|python_tag|>{"name": "add"',
        "mistral": "[TOOL_CALLS][{]",
        "mistral_args": "[TOOL_CALLS]add[ARGS]{",
        "glm": "<tool_call>add\n<arg_key>a</arg_key></tool_call>",
        "deepseek": "<｜tool▁call▁begin｜>add<｜tool▁call▁end｜>",
    }
    form = renderer.form  # type: ignore[attr-defined]
    message = Message("assistant", "Hm.", malformed=(broken[form],))
    turn = turn_of(renderer.render([Message("user", "Q"), message], TOOLS), 1)
    assert renderer.parse(turn) == message


@pytest.mark.slow
@every_family
def test_no_token_changes_in_a_thousand_conversations_of_ten_turns(family: str) -> None:
    renderer = renderer_of(family)
    rng = random.Random(0)
    for messages in conversations(subject_of(family), 1000, TEXTS + ODD, turns=10):
        assert changed(renderer, messages, [rng.randrange(1, len(messages))]) == 0
        assert continued(renderer, messages, ended=True)


def test_reasoning_and_calls_written_in_a_content_are_the_models_tokens() -> None:
    # Data sets often hold both in the text of a message.
    renderer = renderer_of("qwen3")
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "text": "x y"}}\n</tool_call>'
    in_text = said(f"<think>\nEasy.\n</think>\n\n2\n{call}")
    apart = said("2", CALL, reasoning="Easy.")
    prompt = Message("user", "Q")
    assert renderer.render([prompt, in_text]) == renderer.render([prompt, apart])


# --- what does not fit --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "family", "nearest"),
    [
        ("qwen3", "qwen2_5", "chatml"),
        ("llama3", "qwen3", "qwen3"),
        ("chatml", "gemma", "gemma"),
        ("gemma", "llama3", "llama3"),
        ("mistral", "deepseek_v3", "deepseek"),
        ("glm4", "phi4", "phi"),
        ("deepseek", "mistral_v7", "mistral"),
        ("phi", "glm4", "glm4"),
    ],
)
def test_a_tokenizer_of_another_family_is_refused(name: str, family: str, nearest: str) -> None:
    made: Renderer[Any] = MANAGER.build(CONTRACTS["renderer"], name, {})
    with pytest.raises(ConfigError, match=f"'{name}' does not fit .* lacks .*'{nearest}'"):
        made.setup(tokenizer_of(family), ())


@pytest.mark.parametrize("family", ["gemma", "phi3"])
def test_tools_are_refused_by_a_format_without_them(family: str) -> None:
    renderer = renderer_of(family)
    for messages, tools in (
        ([Message("user", "Q")], TOOLS),
        ([Message("user", "Q"), said("", CALL)], ()),
        ([Message("user", "Q"), Message("tool", "2")], ()),
    ):
        with pytest.raises(DataError, match="has no tools"):
            renderer.render(messages, tools)


@pytest.mark.parametrize("family", ["gemma", "deepseek_v3", "mistral_v3", "glm4", "llama3"])
def test_a_late_system_message_is_written_or_refused(family: str) -> None:
    renderer = renderer_of(family)
    messages = [Message("user", "Q"), Message("system", "Be brief."), said("ok")]
    if family in ("glm4", "llama3"):
        assert 1 in renderer.render(messages).message
    else:
        with pytest.raises(DataError, match="message 1"):
            renderer.render(messages)


def test_a_system_message_without_a_place_is_refused() -> None:
    with pytest.raises(DataError, match="first message is of role assistant"):
        renderer_of("gemma").render([Message("system", "S"), said("Hi")])


@pytest.mark.parametrize("name", ["glm4", "chat_template"])
def test_glm_goes_on_after_whatever_token_ended_the_turn(name: str) -> None:
    tokenizer = tokenizer_of("glm4")
    names = ("<|user|>", "<|observation|>", "<|endoftext|>")
    user, observation, text_end = (tokenizer.convert_tokens_to_ids(each) for each in names)
    renderer: Renderer[Any] = MANAGER.build(CONTRACTS["renderer"], name, {})
    chat = ChatTokenizer(tokenizer, None, (user, observation, text_end), renderer)
    for message, begins in ((Message("user", "Q"), user), (Message("tool", "2"), observation)):
        closed = chat.extend([message], TOOLS, ended=False)
        assert closed[0] == begins and begins not in closed[1:]
        for last in (user, observation, text_end):
            want = closed[1:] if last == begins else closed
            assert chat.extend([message], TOOLS, ended=True, last=last) == want


def test_a_renderer_of_others_that_takes_no_tools_to_parse_is_called_without() -> None:
    class Older(TemplateRenderer):
        def parse(self, token_ids: Sequence[int]) -> Message:  # type: ignore[override]
            return Message("assistant", "as before")

    chat = ChatTokenizer(tokenizer_of("qwen3"), None, renderer=Older(TemplateConfig()))
    assert chat.parse_response([1], [NOTE]).content == "as before"


@pytest.mark.parametrize("family", sorted({f for f, chat in SAME if chat in WITH_CALLS}))
def test_arguments_and_results_are_written_as_the_own_template_writes_them(family: str) -> None:
    renderer, tokenizer = renderer_of(family), tokenizer_of(family)
    for text in LIKE_VALUES:
        call = replace(CALL, name="note", arguments={"text": text, **NOTED})
        result = Message("tool", text, name="note", tool_call_id=call.id)
        chat = [Message("user", "Q"), Message("assistant", "", (call,)), result]
        want = tokenizer.apply_chat_template(
            [message_to_json(message) for message in chat],
            tools=[NOTE],
            add_generation_prompt=True,
            return_dict=False,
        )
        got = renderer.render(chat, [NOTE], generation_prompt=True).token_ids
        assert tokenizer.decode(got) == tokenizer.decode(want), text
