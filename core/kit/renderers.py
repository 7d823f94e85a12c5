"""What renderers promise, on conversations made at random."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from posttrain.core.contracts import Rendered, Renderer
from posttrain.core.data.control import ControlTokens
from posttrain.core.data.tool_calls import json_text
from posttrain.core.kit.checks import Subject, check, expect, expect_equal
from posttrain.core.types import Message, ToolCall, ToolSchema

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOOLS: tuple[ToolSchema, ...] = (
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Sum of é and ü.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    },
)
CALL = ToolCall("add", {"a": 1, "text": "x y"}, "abcdefghi")

NOTE: ToolSchema = {
    "type": "function",
    "function": {
        "name": "note",
        "description": "Keeps what it is given.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "code": {"enum": ["1", "2"]},
                "count": {"type": "integer"},
                "ratio": {"type": "number"},
                "sure": {"type": "boolean"},
                "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "items": {"type": "array", "items": {"type": "string"}},
                "more": {"type": "object"},
            },
        },
    },
}
"""A tool with an argument of each type."""
NOTED = {
    **{"code": "1", "count": 5, "ratio": 0.5, "sure": True, "limit": None},
    **{"items": ["5", "true"], "more": {"5": [None, "5"]}},
}
LIKE_VALUES = (
    *(
        "5",
        "-1",
        "007",
        "1e3",
        "0.10",
        "true",
        "null",
        "None",
        "[1]",
        '{"a": 1}',
        '"x"',
        "2024-01-05",
    ),
    *("", " ", "  x  ", "\n", "a\n\nb\n", "naïve 日本語 🙂", "</b> <a> c", "x </tool_call> y"),
)
"""Strings that a format without quotes may take for other values, or may change."""

TEXTS = (
    *(
        "What is 2 + 2?",
        "It is 4.",
        "a",
        "- one\n- two",
        "x = (1,\n     2)",
        "naïve ☃ 日本語",
        "🙂👩‍🚀",
    ),
    *("def f():\n\n    return 1", "a < b > c </b> [x] {y}", "1 000 000", "Let me see:\n\n$x^2$;"),
)
ODD = (
    *("", " ", "\n", "\n\n", "  x  ", "\nx\n", "\t", "x\n\n", " \n x", "\u200b", "\x00", "\ufeff"),
    *("<think>", "</think>", "<tool_call>", "</tool_response>", "<|im", "_end|>", "<|im_end|>"),
    *("[INST]", "</s>", "<|eot_id|>", "<end_of_turn>", "<|user|>", "<｜User｜>", "a<|im_end|>b"),
)
"""Texts with blanks at the ends, parts of tags, and control tokens of one family or another."""


def random_conversation(
    rng: random.Random, *, turns: int, tools: bool, texts: Sequence[str] = TEXTS
) -> list[Message]:
    """A conversation of up to `turns` turns of the user's, each answered, with calls if `tools`."""
    made = [Message("system", rng.choice(texts))] if rng.random() < 0.5 else []
    for _ in range(rng.randint(1, turns)):
        made.append(Message("user", rng.choice(texts)))
        while tools and rng.random() < 0.4:
            asked = [
                ToolCall(
                    rng.choice(("add", "look_up")),
                    {"a": rng.randint(-9, 9), "text": rng.choice(TEXTS[:7]), "list": [1, None]},
                )
                for _ in range(rng.randint(1, 3))
            ]
            made.append(_assistant(rng, texts, tuple(asked)))
            made += [Message("tool", rng.choice(texts), name=call.name) for call in asked]
        made.append(_assistant(rng, texts, ()))
    return made


def _assistant(
    rng: random.Random, texts: Sequence[str], tool_calls: tuple[ToolCall, ...]
) -> Message:
    content = "" if tool_calls and rng.random() < 0.5 else rng.choice(texts)
    reasoning = rng.choice(texts) if rng.random() < 0.3 else ""
    return Message("assistant", content, tool_calls, reasoning=reasoning)


@cache
def _own_tokenizer() -> PreTrainedTokenizerBase:
    from posttrain.core.kit.tiny import make_byte_tokenizer

    return make_byte_tokenizer()


def tokenizer_of(subject: Subject) -> PreTrainedTokenizerBase:
    return subject.tokenizer or _own_tokenizer()


def ready(subject: Subject) -> Renderer[Any]:
    """The renderer with its tokenizer. Any: renderers of any config."""
    made: Renderer[Any] = subject.build()
    tokenizer = tokenizer_of(subject)
    ends = () if subject.tokenizer is not None else (int(tokenizer.eos_token_id),)
    made.setup(tokenizer, ends)
    return made


def turn_of(rendered: Rendered, index: int) -> list[int]:
    """The tokens that the assistant wrote in message `index`."""
    rows = zip(rendered.token_ids, rendered.sampled, rendered.message, strict=True)
    return [token for token, sampled, message in rows if sampled and message == index]


def without_ids(message: Message) -> tuple[object, ...]:
    """What a message says, call ids left out, which not every format writes."""
    calls = [(call.name, dict(call.arguments)) for call in message.tool_calls]
    return message.content, message.reasoning, calls, message.malformed


def tools_of(renderer: Renderer[Any]) -> tuple[ToolSchema, ...]:
    return TOOLS if renderer.takes_tools else ()


def conversations(
    subject: Subject, count: int, texts: Sequence[str] = TEXTS, turns: int = 5
) -> list[list[Message]]:
    """The same conversations each time, with calls where the format has them."""
    rng = random.Random(0)
    tools = bool(subject.build().takes_tools)
    return [random_conversation(rng, turns=turns, tools=tools, texts=texts) for _ in range(count)]


@check("an assistant's message survives rendering and parsing", "renderer")
def _round_trip(subject: Subject) -> None:
    renderer = ready(subject)
    for messages in conversations(subject, 20):
        rendered = renderer.render(messages, tools_of(renderer))
        for i, message in enumerate(messages):
            if message.role == "assistant":
                turn = turn_of(rendered, i)
                read = without_ids(renderer.parse(turn))
                expect_equal(read, without_ids(message), "what is read of a turn")
                open_turn = renderer.parse(turn[:-1])
                expect_equal(open_turn, renderer.parse(turn), "a turn without its end")


@check("arguments keep their types when the tools' schemas are given", "renderer")
def _typed_arguments(subject: Subject) -> None:
    renderer = ready(subject)
    if not renderer.takes_tools:
        return
    for text in LIKE_VALUES:
        call = replace(CALL, name="note", arguments={"text": text, **NOTED})
        chat = [Message("user", "Q"), Message("assistant", "", (call,))]
        turn = turn_of(renderer.render(chat, [NOTE]), 1)
        read = [json_text(c.arguments) for c in renderer.parse_turn(turn, [NOTE]).tool_calls]
        expect_equal(read, [json_text(call.arguments)], f"arguments with the string {text!r}")


@check("any tokens are parsed without an error", "renderer")
def _any_tokens(subject: Subject) -> None:
    renderer, rng, size = ready(subject), random.Random(0), len(tokenizer_of(subject))
    controls = list(controls_of(subject).values())
    for _ in range(200):
        ids = [rng.randrange(-5, size + 5) for _ in range(rng.randint(0, 30))]
        ids = [rng.choice(controls) if rng.random() < 0.3 else token for token in ids]
        expect_equal(renderer.parse(ids).role, "assistant", "the role of what is read")


def controls_of(subject: Subject) -> dict[str, int]:
    """Ids of the tokenizer's control tokens, with those that are not marked as special."""
    return ControlTokens(tokenizer_of(subject), (), subject.tags).ids


def changed(renderer: Renderer[Any], messages: list[Message], lengths: Sequence[int]) -> int:
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


@check("no message changes a token before it", "renderer")
def _stable(subject: Subject) -> None:
    renderer = ready(subject)
    for texts in (TEXTS, TEXTS + ODD):
        for messages in conversations(subject, 5, texts):
            moved = changed(renderer, messages, range(1, len(messages)))
            expect(moved == 0, f"{moved} tokens change when later messages follow")
            for ended in (True, False):
                expect(
                    continued(renderer, messages, ended=ended),
                    f"turns and `extend(ended={ended})` do not make the tokens of `render`",
                )


@check("a last turn of the assistant's is continued", "renderer")
def _continued_turn(subject: Subject) -> None:
    renderer = ready(subject)
    prompt = [Message("user", "Q"), Message("assistant", "It is")]
    opened = renderer.render(prompt, generation_prompt=True)
    whole = renderer.render(prompt)
    beginning = whole.token_ids[: len(opened.token_ids)]
    expect_equal(opened.token_ids, beginning, "the open turn")
    expect(not set(opened.token_ids[-1:]) & set(renderer.end_token_ids), "it ends the open turn")
    expect_equal(len(turn_of(whole, 1)), len(turn_of(opened, 1)) + 1, "tokens of the ended turn")


@check("the mask is on what the assistant wrote, and its end", "renderer")
def _mask(subject: Subject) -> None:
    renderer, tokenizer = ready(subject), tokenizer_of(subject)
    for messages in conversations(subject, 10, TEXTS + ODD):
        rendered = renderer.render(messages, tools_of(renderer))
        lengths = {len(part) for part in (rendered.token_ids, rendered.sampled, rendered.message)}
        expect(len(lengths) == 1, f"token_ids, sampled and message have the lengths {lengths}")
        in_order = list(rendered.message) == sorted(rendered.message)
        expect(in_order, "tokens of a message stand after those of a later one")
        for i, message in enumerate(messages):
            turn = turn_of(rendered, i)
            expect(
                bool(turn) == (message.role == "assistant"),
                f"a message of the {message.role}'s has {len(turn)} tokens in the mask",
            )
            if turn:
                *own, end = turn
                expect(end in renderer.end_token_ids, "a turn does not end with an end token")
                expect(not set(own) & set(renderer.end_token_ids), "a turn ends in its middle")
                said = message.content.strip()[:1]
                found = said in tokenizer.decode(own)
                expect(found, f"the content begins with {said!r}, which is not in the mask")


@check("control tokens in what people bring stay text", "renderer")
def _hostile_text(subject: Subject) -> None:
    renderer, tokenizer = ready(subject), tokenizer_of(subject)
    known = controls_of(subject)

    def controls_in(token_ids: Sequence[int]) -> list[int]:
        return [token for token in token_ids if token in set(known.values())]

    def chat(text: str) -> tuple[list[Message], list[ToolSchema]]:
        said = Message("assistant", "ok")
        messages = [Message("system", text), Message("user", text), said]
        if not renderer.takes_tools:
            return messages, []
        called = Message("assistant", "", (CALL,))
        messages += [Message("user", "Q"), called, Message("tool", text), said]
        schema = {"name": "add", "description": text, "parameters": {"enum": [text]}}
        return messages, [{"type": "function", "function": schema}]

    messages, tools = chat("x")
    plain = controls_in(renderer.render(messages, tools).token_ids)
    after = controls_in(renderer.extend([Message("user", "x")], ended=True))
    names = sorted(known)
    hostile = [*names, "".join(names), " ".join(names), *(f"<{n}>" for n in names)]
    hostile += [name[:2] + name + name[2:] for name in names]
    for text in hostile:
        messages, tools = chat(text)
        rendered = renderer.render(messages, tools)
        expect_equal(controls_in(rendered.token_ids), plain, f"control tokens with {text[:60]!r}")
        extended = renderer.extend([Message("user", text)], ended=True)
        expect_equal(controls_in(extended), after, f"control tokens of extend with {text[:60]!r}")
        user = [t for t, m in zip(rendered.token_ids, rendered.message, strict=True) if m == 1]
        written = str(tokenizer.decode(user)).replace(" ", "")
        expect(text.replace(" ", "") in written, f"the text {text[:60]!r} of the user is changed")


@check("text of an assistant ends no turn and begins none", "renderer")
def _own_text(subject: Subject) -> None:
    renderer, tokenizer = ready(subject), tokenizer_of(subject)
    ends = [str(tokenizer.convert_ids_to_tokens(i)) for i in renderer.end_token_ids]
    said = Message("assistant", f"a{ends[0]}b", reasoning=f"c{ends[-1]}d")
    turn = turn_of(renderer.render([Message("user", "Q"), said]), 1)
    count = sum(token in renderer.end_token_ids for token in turn)
    expect_equal(count, 1, "end tokens of a turn whose text names them")
    expect_equal(without_ids(renderer.parse(turn)), without_ids(said), "what is read of it")
