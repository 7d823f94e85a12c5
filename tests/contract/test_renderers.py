"""What every renderer promises, for each family's tokens, and each family's own chat template."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import pytest

from posttrain.core.contracts import CONTRACTS, Renderer
from posttrain.core.data.control import ControlTokens
from posttrain.core.data.messages import message_to_json
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.data.turns import FAMILIES as KNOWN
from posttrain.core.errors import ConfigError, DataError
from posttrain.core.types import Message, ToolSchema
from tests.helpers.plugins import MANAGER
from tests.helpers.renderers import (
    CALL,
    CHATS,
    FAMILIES,
    ODD,
    TEXTS,
    TOOLS,
    WITH_CALLS,
    random_conversation,
    said,
    tokenizer_of,
    turn_of,
)

every_family = pytest.mark.parametrize("family", FAMILIES)


def renderer_of(family: str, **fields: object) -> Renderer[Any]:
    made: Renderer[Any] = MANAGER.build(
        CONTRACTS["renderer"], FAMILIES[family].renderer, dict(fields)
    )
    made.setup(tokenizer_of(family), ())
    return made


@cache
def controls_of(family: str) -> dict[str, int]:
    """Ids of the family's control tokens, with those that are not marked as special."""
    tags = FAMILIES[family].tags
    return ControlTokens(tokenizer_of(family), (), tags).ids


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


def without_ids(message: Message) -> tuple[object, ...]:
    calls = [(call.name, dict(call.arguments)) for call in message.tool_calls]
    return message.content, message.reasoning, calls, message.malformed


def conversations(family: str, count: int, texts: Sequence[str]) -> list[list[Message]]:
    rng = random.Random(family)
    tools = bool(renderer_of(family).takes_tools)
    return [random_conversation(rng, turns=10, tools=tools, texts=texts) for _ in range(count)]


def tools_of(renderer: Renderer[Any]) -> tuple[ToolSchema, ...]:
    return TOOLS if renderer.takes_tools else ()


@every_family
def test_an_assistants_message_survives_rendering_and_parsing(family: str) -> None:
    renderer = renderer_of(family)
    for messages in conversations(family, 20, TEXTS):
        rendered = renderer.render(messages, tools_of(renderer))
        for i, message in enumerate(messages):
            if message.role == "assistant":
                turn = turn_of(rendered, i)
                assert without_ids(renderer.parse(turn)) == without_ids(message)
                assert renderer.parse(turn[:-1]) == renderer.parse(turn)


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


@every_family
def test_any_tokens_are_parsed_without_an_error(family: str) -> None:
    renderer, rng = renderer_of(family), random.Random(0)
    controls = list(controls_of(family).values())
    for _ in range(200):
        ids = [rng.randrange(-5, len(tokenizer_of(family)) + 5) for _ in range(rng.randint(0, 30))]
        ids = [rng.choice(controls) if rng.random() < 0.3 else token for token in ids]
        assert renderer.parse(ids).role == "assistant"


# --- stable prefixes ----------------------------------------------------------------------------


def changed(renderer: Renderer[Any], messages: list[Message], lengths: Iterable[int]) -> int:
    """Tokens that differ between the whole conversation and its beginnings of these lengths."""
    tools = tools_of(renderer)
    whole = renderer.render(messages, tools)
    wrong = 0
    for k in lengths:
        part = renderer.render(messages[:k], tools)
        for a, b in zip(part.token_ids, whole.token_ids, strict=False):
            wrong += a != b
        wrong += whole.sampled[: len(part.sampled)] != part.sampled
        if messages[k].role == "assistant":
            prompt = renderer.render(messages[:k], tools, generation_prompt=True).token_ids
            wrong += whole.token_ids[: len(prompt)] != prompt
    return wrong


def continued(renderer: Renderer[Any], messages: list[Message], *, ended: bool) -> bool:
    """Whether sampling turn by turn, with `extend` in between, gives the whole conversation."""
    tools = tools_of(renderer)
    whole = renderer.render(messages, tools)
    turns = [i for i, message in enumerate(messages) if message.role == "assistant"]
    ids = list(renderer.render(messages[: turns[0]], tools, generation_prompt=True).token_ids)
    for i, following in zip(turns, [*turns[1:], None], strict=True):
        turn = turn_of(whole, i)
        ids += turn if ended or following is None else turn[:-1]
        if following is not None:
            ids += renderer.extend(messages[i + 1 : following], tools, ended=ended)
    return tuple(ids) == whole.token_ids[: len(ids)]


@pytest.mark.parametrize("texts", [TEXTS, TEXTS + ODD], ids=["plain", "odd"])
@every_family
def test_no_message_changes_a_token_before_it(family: str, texts: Sequence[str]) -> None:
    renderer = renderer_of(family)
    for messages in conversations(family, 10, texts):
        assert changed(renderer, messages, range(1, len(messages))) == 0
        assert continued(renderer, messages, ended=True)
        assert continued(renderer, messages, ended=False)


@pytest.mark.slow
@every_family
def test_no_token_changes_in_a_thousand_conversations_of_ten_turns(family: str) -> None:
    renderer = renderer_of(family)
    rng = random.Random(0)
    for messages in conversations(family, 1000, TEXTS + ODD):
        assert changed(renderer, messages, [rng.randrange(1, len(messages))]) == 0
        assert continued(renderer, messages, ended=True)


@every_family
def test_a_last_turn_of_the_assistants_is_continued(family: str) -> None:
    renderer = renderer_of(family)
    prompt = [Message("user", "Q"), said("It is")]
    opened = renderer.render(prompt, generation_prompt=True)
    whole = renderer.render([Message("user", "Q"), said("It is")])
    assert opened.token_ids == whole.token_ids[: len(opened.token_ids)]
    assert not set(opened.token_ids[-1:]) & set(renderer.end_token_ids)
    assert len(turn_of(whole, 1)) == len(turn_of(opened, 1)) + 1


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


# --- masks and control tokens -------------------------------------------------------------------


@every_family
def test_the_mask_is_on_what_the_assistant_wrote_and_its_end(family: str) -> None:
    renderer, tokenizer = renderer_of(family), tokenizer_of(family)
    for messages in conversations(family, 10, TEXTS + ODD):
        rendered = renderer.render(messages, tools_of(renderer))
        assert len({len(part) for part in (rendered.token_ids, rendered.sampled)}) == 1
        assert list(rendered.message) == sorted(rendered.message)
        for i, message in enumerate(messages):
            turn = turn_of(rendered, i)
            assert bool(turn) == (message.role == "assistant")
            if turn:
                *own, end = turn
                assert end in renderer.end_token_ids
                assert not set(own) & set(renderer.end_token_ids)
                if message.content.strip():
                    assert message.content.strip()[:1] in tokenizer.decode(own)


def controls_in(family: str, token_ids: Sequence[int]) -> list[int]:
    known = set(controls_of(family).values())
    return [token for token in token_ids if token in known]


@every_family
def test_control_tokens_in_what_people_bring_stay_text(family: str) -> None:
    renderer = renderer_of(family)
    names = sorted(controls_of(family))

    def chat(text: str) -> tuple[list[Message], list[ToolSchema]]:
        messages = [Message("system", text), Message("user", text), said("ok")]
        if not renderer.takes_tools:
            return messages, []
        messages += [Message("user", "Q"), said("", CALL), Message("tool", text), said("ok")]
        schema = {"name": "add", "description": text, "parameters": {"enum": [text]}}
        return messages, [{"type": "function", "function": schema}]

    messages, tools = chat("x")
    plain = controls_in(family, renderer.render(messages, tools).token_ids)
    hostile = [*names, "".join(names), " ".join(names), *(f"<{n}>" for n in names)]
    hostile += [name[:2] + name + name[2:] for name in names]
    for text in hostile:
        messages, tools = chat(text)
        rendered = renderer.render(messages, tools)
        assert controls_in(family, rendered.token_ids) == plain, text
        extended = renderer.extend([Message("user", text)], ended=True)
        assert controls_in(family, extended) == controls_in(
            family, renderer.extend([Message("user", "x")], ended=True)
        )
        user = [t for t, m in zip(rendered.token_ids, rendered.message, strict=True) if m == 1]
        assert text.replace(" ", "") in tokenizer_of(family).decode(user).replace(" ", "")


@every_family
def test_text_of_an_assistant_ends_no_turn_and_begins_none(family: str) -> None:
    renderer = renderer_of(family)
    ends = [tokenizer_of(family).convert_ids_to_tokens(i) for i in renderer.end_token_ids]
    messages = [Message("user", "Q"), said(f"a{ends[0]}b", reasoning=f"c{ends[-1]}d")]
    turn = turn_of(renderer.render(messages), 1)
    assert sum(token in renderer.end_token_ids for token in turn) == 1
    assert without_ids(renderer.parse(turn)) == without_ids(messages[1])


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
