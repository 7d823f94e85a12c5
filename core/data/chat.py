"""What a model's own files say of its chats: how they are written, and which tokens end a turn."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jinja2 import TemplateError

from posttrain.core.errors import DataError, ResourceError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, str]]

MARK = "TheContentStandsHere"
"""A content that no template changes, to see what is written around it."""


class TurnEnd(NamedTuple):
    """What the template writes after an assistant's content: a text, mostly empty, and a token."""

    text: str
    token: int


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, *, generation_prompt: bool
) -> str:
    """The chat as the template writes it; raises `DataError` if the template refuses it."""
    try:
        chat = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=generation_prompt,
            tokenize=False,
        )
    except (TemplateError, TypeError, ValueError, LookupError) as error:
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(
            f"the model's chat template refuses the prompt's messages (of the roles {roles}): "
            f"{error}: correct their roles, or choose a model with another template"
        ) from error
    return str(chat)


def render_open(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> str:
    """The chat up to the end of its last message, an assistant's, which is to be continued.

    The content is written as it is, even if the template strips or rewrites contents.
    """
    marked = [*messages[:-1], {**messages[-1], "content": MARK}]
    before, found, _ = render(tokenizer, marked, generation_prompt=False).rpartition(MARK)
    if not found:
        raise DataError(
            "the model's chat template leaves the last assistant's message out, so it cannot be "
            "continued: end the prompt with the user's message, or choose a model with another "
            "template"
        )
    return before + messages[-1]["content"]


def takes_system_messages(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the template writes a system message; some refuse it, others leave it out."""
    chat = [{"role": "system", "content": MARK}, {"role": "user", "content": "Q"}]
    try:
        return MARK in render(tokenizer, chat, generation_prompt=True)
    except DataError:
        return False


def without_system(messages: Messages) -> list[Mapping[str, str]]:
    """The messages with the leading system message put in front of the user's first."""
    system, *rest = messages
    if not rest or rest[0]["role"] != "user":
        return [{"role": "user", "content": system["content"]}, *rest]
    first = {**rest[0], "content": f"{system['content']}\n\n{rest[0]['content']}"}
    return [first, *rest[1:]]


def turn_end(tokenizer: PreTrainedTokenizerBase) -> TurnEnd | None:
    """How the template ends an assistant's turn, if it does so with a special token."""
    if tokenizer.chat_template is None:
        return None
    chat = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": MARK}]
    try:
        text = render(tokenizer, chat, generation_prompt=False)
    except DataError:
        return None
    before, found, after = text.rpartition(MARK)
    special = special_tokens(tokenizer)
    if not found or not special:
        return None
    names = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))))
    end = names.search(after)
    # A template without an end may begin the next turn at once: that token also opened this one.
    if end is None or end[0] in names.findall(before)[-1:]:
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
    """`eos_token_id` of generation_config.json, without that file of config.json.

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
        derived = path.name == "config.json" or bool(values.get("_from_model_config"))
    except (OSError, ValueError, AttributeError) as error:
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
