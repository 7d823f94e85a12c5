"""What a model's own files say of its chats: how they are written, and which tokens end a turn."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2

from posttrain.core.data.messages import message_to_json
from posttrain.core.errors import DataError, ResourceError
from posttrain.core.types import Message, ToolSchema

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Json = dict[str, Any]  # Any: JSON values

MARK = "TheContentStandsHere"
"""A content that no template changes, to see what is written around it."""


class TurnEnd(NamedTuple):
    """What the template writes after an assistant's content: a text, mostly empty, and a token."""

    text: str
    token: int


def chat_text_of(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[ToolSchema] = (),
    *,
    generation_prompt: bool,
    turns: list[tuple[int, int]] | None = None,
) -> str:
    """The chat as the template writes it; raises `DataError` if the template refuses it.

    Raises `ResourceError` for a template that Jinja cannot read.

    `turns` gets the characters of what the template marks with `{% generation %}`.
    """
    problem: Exception | None = None
    for form in _FORMS if any(m.tool_calls or m.role == "tool" for m in messages) else _FORMS[:1]:
        try:
            return _rendered(tokenizer, form(messages), tools, generation_prompt, turns)
        except Exception as error:  # a template is a program, which may raise anything
            problem = problem or error
    if isinstance(problem, jinja2.TemplateSyntaxError):
        raise ResourceError(
            f"the model's chat template is wrong, line {problem.lineno}: {problem.message}: "
            "correct chat_template of the tokenizer's files, or choose another model"
        ) from problem
    roles = ", ".join(message.role for message in messages)
    raise DataError(
        f"the model's chat template refuses the prompt's messages (of the roles {roles}): "
        f"{problem}: correct their roles, or choose a model with another template"
    ) from problem


def _rendered(
    tokenizer: PreTrainedTokenizerBase,
    chat: list[Json],
    tools: Sequence[ToolSchema],
    generation_prompt: bool,
    turns: list[tuple[int, int]] | None,
) -> str:
    schemas: Any = [dict(tool) for tool in tools] or None  # Any: transformers' own union
    if turns is None:
        return str(
            tokenizer.apply_chat_template(
                chat, tools=schemas, add_generation_prompt=generation_prompt, tokenize=False
            )
        )
    from transformers.utils import chat_template_utils

    render: Any = chat_template_utils.render_jinja_template  # Any: its types are too narrow
    (text,), (found,) = render(
        conversations=[chat],
        tools=schemas,
        chat_template=tokenizer.get_chat_template(None, schemas),
        add_generation_prompt=generation_prompt,
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    turns[:] = [(int(start), int(end)) for start, end in found]
    return str(text)


def _with_ids(messages: Sequence[Message], *, keep: bool = True) -> list[Message]:
    """The messages with an id of nine characters for calls and answers that have none, or all."""
    made, calls, answers = [], 0, 0
    for message in messages:
        given = []
        for call in message.tool_calls:
            given.append(replace(call, id=(call.id if keep else "") or f"call{calls:05d}"))
            calls += 1
        answer = message.tool_call_id if keep else ""
        if message.role == "tool":
            answer, answers = answer or f"call{answers:05d}", answers + 1
        made.append(replace(message, tool_calls=tuple(given), tool_call_id=answer))
    return made


def _as_json(messages: Sequence[Message]) -> list[Json]:
    """Reasoning has both of the names that templates give it (gpt-oss says `thinking`)."""
    thoughts = ({"thinking": m.reasoning} if m.reasoning else {} for m in messages)
    return [{**message_to_json(m), **t} for m, t in zip(messages, thoughts, strict=True)]


def _with_texts(messages: Sequence[Message]) -> list[Json]:
    """Arguments as JSON text, which some templates put together with other text."""
    chat = _as_json(_with_ids(messages))
    for message in chat:
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return chat


_FORMS: tuple[Callable[[Sequence[Message]], list[Json]], ...] = (
    _as_json,
    lambda messages: _as_json(_with_ids(messages)),
    _with_texts,
    lambda messages: _as_json(_with_ids(messages, keep=False)),
)
"""Tool calls in the ways that templates want them, the first that is not refused is taken."""


def own_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[ToolSchema] = (),
    *,
    generation_prompt: bool,
) -> str | None:
    """What the model's own chat template writes; None without one, or if it refuses."""
    try:
        return chat_text_of(tokenizer, messages, tools, generation_prompt=generation_prompt)
    except DataError:
        return None


def turn_end(tokenizer: PreTrainedTokenizerBase) -> TurnEnd | None:
    """How the template ends an assistant's turn, if it does so with a special token."""
    if tokenizer.chat_template is None:
        return None
    chat = [Message("user", "Q"), Message("assistant", MARK)]
    text = own_template(tokenizer, chat, generation_prompt=False)
    if text is None:
        return None
    before, found, after = text.rpartition(MARK)
    special = special_tokens(tokenizer)
    if not found or not special:
        return None
    names = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))))
    end = names.search(after)
    opener = next(iter(reversed(list(names.finditer(before)))), None)
    # A template without an end may begin the next turn at once: that token also opened this one.
    if end is None or (
        opener is not None
        and end[0] == opener[0]
        and after[end.end() :].strip() == before[opener.end() :].strip()
    ):
        return None
    return TurnEnd(after[: end.start()], special[end[0]])


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Ids by name of the tokens with a place of their own in the vocabulary, but not of blanks.

    Some models do not mark the token that ends their turns as special.
    """
    added = {str(t): int(i) for i, t in tokenizer.added_tokens_decoder.items() if str(t).strip()}
    named = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
    return added | {str(name): int(i) for name, i in named if i is not None}


def stored_ends(folder: Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """`eos_token_id` of generation_config.json, without that file of config.json or its text part.

    A single id that was copied from a model class's defaults may be any token: it counts if it is a
    special one.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        path = folder / "config.json"
    if not path.is_file():
        return []
    try:
        values = json.loads(path.read_text("utf-8"))
        given = values.get("eos_token_id")
        if given is None:
            given = (values.get("text_config") or {}).get("eos_token_id")
        derived = path.name == "config.json" or bool(values.get("_from_model_config"))
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ResourceError(f"'{path}' is not a JSON object ({error}): restore the file") from error
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise ResourceError(
            f"'{path}': eos_token_id is {given!r}, expected a token's id or a list of them: "
            "correct it"
        )
    if derived and not isinstance(given, list):
        special = set(special_tokens(tokenizer).values())
        return [i for i in ids if i in special]
    return [i for i in ids if 0 <= i < len(tokenizer)]
