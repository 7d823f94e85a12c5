"""Cells of a row of preferences: its prompt, its answers and its numbers.

Importing this module needs no torch.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from posttrain.core.contracts.preference_rows import Answer
from posttrain.core.data.formats import conversation
from posttrain.core.data.messages import messages_from_json, short, tools_from_json
from posttrain.core.errors import DataError
from posttrain.core.runtime.json_files import JsonRow
from posttrain.core.types import Message, ToolSchema

LARGEST_MARGIN = 1_000_000
PROMPTS = ("prompt", "question", "instruction", "conversations", "messages")
ASKED = PROMPTS[:3]
"""Those that hold nothing but the prompt; some sets keep the chosen conversation in `messages`."""
SCORE_PAIRS = (
    ("score_chosen", "score_rejected"),
    ("chosen_score", "rejected_score"),
    ("chosen_rating", "rejected_rating"),
    ("chosen-rating", "rejected-rating"),
)
HUMAN = "\n\nHuman:"
_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")


def prompt_and_answers(line: JsonRow) -> tuple[tuple[Message, ...], tuple[Answer, Answer]]:
    """Of a pair, whatever holds the prompt: a column, or what both answers begin with."""
    values, where = line.values, line.where
    chosen, rejected = values["chosen"], values["rejected"]
    has_prompt = any(values.get(name) is not None for name in PROMPTS)
    if _is_whole(chosen) and _is_whole(rejected):
        prompt, answers = _split(line)
        if any(values.get(name) is not None for name in ASKED):
            _check_given(line, prompt)
        return _with_system(line, prompt), answers
    if not has_prompt:
        if isinstance(chosen, str) and isinstance(rejected, str):
            prompt, chosen, rejected = _shared_text(chosen, rejected, where)
        else:
            raise DataError(
                f"{where}: 'chosen' and 'rejected' are {short(chosen)} and {short(rejected)}, "
                "expected two texts or two lists of chat messages that begin with the prompt: "
                "correct this line"
            )
        prompt = _with_system(line, prompt)
    else:
        prompt = prompt_of(line)
    return prompt, (answer_of(chosen, "chosen", where), answer_of(rejected, "rejected", where))


def _is_whole(value: object) -> bool:
    """Whether these messages are a conversation with its prompt, not an answer alone."""
    if not isinstance(value, list | tuple) or not value or not isinstance(value[0], Mapping):
        return False
    role = value[0].get("role", value[0].get("from"))
    return role not in ("assistant", "gpt", "model", "function_call")


def _split(line: JsonRow) -> tuple[tuple[Message, ...], tuple[Answer, Answer]]:
    """The turns that two conversations share, and what follows them in each."""
    where = line.where
    chosen, rejected = (chat_of(line.values[n], n, where) for n in ("chosen", "rejected"))
    shared = shared_turns(chosen, rejected)
    if not shared:
        raise _no_prompt(where)
    for name, chat in (("chosen", chosen), ("rejected", rejected)):
        if shared >= len(chat) or chat[shared].role != "assistant":
            role = chat[shared].role if shared < len(chat) else "none"
            raise DataError(
                f"{where}: 'chosen' and 'rejected' differ first in message {shared}, which is of "
                f"the role {role} in '{name}', expected one assistant message after the prompt "
                "that both share: correct this line"
            )
    answers = (
        checked_answer(chosen[shared:], "chosen", where),
        checked_answer(rejected[shared:], "rejected", where),
    )
    return chosen[:shared], answers


def _no_prompt(where: str) -> DataError:
    return DataError(
        f"{where} has no 'prompt', and 'chosen' and 'rejected' begin differently, so none can be "
        "read from them: add 'prompt'"
    )


def shared_turns(chosen: Sequence[Message], rejected: Sequence[Message]) -> int:
    """How many messages both begin with, so that an answer of each is left."""
    shared = 0
    for left, right in zip(chosen, rejected, strict=False):
        if left != right:
            break
        shared += 1
    while shared and shared >= min(len(chosen), len(rejected)):
        shared -= 1
    return shared


def _check_given(line: JsonRow, prompt: Sequence[Message]) -> None:
    """A prompt that is given in addition to whole conversations is part of what they share."""
    given = [message for message in prompt_of(line) if message.role != "system"]
    there = {message.content.strip() for message in prompt}
    if not all(message.content.strip() in there for message in given):
        raise DataError(
            f"{line.where}: 'prompt' is {short(line.values.get('prompt'))}, which is not in what "
            "'chosen' and 'rejected' begin with, expected one prompt: correct this line"
        )


def prompt_of(line: JsonRow) -> tuple[Message, ...]:
    name = next((name for name in PROMPTS if line.values.get(name) is not None), "prompt")
    value = line.values.get(name)
    if name == "instruction" and isinstance(value, str):
        more = line.values.get("input")
        value = f"{value}\n{more}" if isinstance(more, str) and more.strip() else value
    if isinstance(value, str) and value.strip():
        return _with_system(line, (Message("user", value),))
    if not isinstance(value, list | tuple) or not value:
        raise DataError(
            f"{line.where}: field '{name}' is {short(value)}, expected non-empty text or a list "
            "of chat messages: correct this line"
        )
    return _with_system(line, chat_of(value, name, line.where))


def _with_system(line: JsonRow, prompt: tuple[Message, ...]) -> tuple[Message, ...]:
    """The prompt after the text of the column `system`, unless it has a system message."""
    system = line.values.get("system")
    if not isinstance(system, str) or not system.strip() or prompt[0].role == "system":
        return prompt
    return (Message("system", system), *prompt)


def answer_of(value: object, field: str, where: str) -> Answer:
    if isinstance(value, Mapping):
        value = [value]
    if isinstance(value, list | tuple) and value:
        return checked_answer(chat_of(value, field, where), field, where)
    if not isinstance(value, str) or not value.strip():
        raise DataError(
            f"{where}: field '{field}' is {short(value)}, expected non-empty text or one "
            "assistant message: correct this line"
        )
    return (Message("assistant", value),)


def checked_answer(answer: Answer, field: str, where: str) -> Answer:
    """The answer, if it begins and ends with the assistant and turns are in order between."""
    roles = [message.role for message in answer]
    turns = zip(roles, roles[1:], strict=False)
    fits = roles[0] == roles[-1] == "assistant" and all(
        (now == "assistant") != (after == "assistant") or now == after == "tool"
        for now, after in turns
    )
    if not fits or "system" in roles:
        raise DataError(
            f"{where}: field '{field}' holds messages of {roles} after the prompt, expected one "
            "assistant message, or turns in which the assistant speaks first and last and others "
            "in between: put the earlier ones into 'prompt'"
        )
    for message in answer:
        said = message.content.strip() or message.tool_calls or message.reasoning.strip()
        if message.role == "assistant" and not said:
            raise DataError(
                f"{where}: field '{field}' has an empty message of the assistant, expected text or "
                "tool calls: correct this line"
            )
    if not any(message.train for message in answer if message.role == "assistant"):
        raise DataError(
            f"{where}: field '{field}' has no message to learn from, because each has "
            "'train': false: set one to true, or remove this line"
        )
    return answer


def chat_of(value: object, field: str, where: str) -> tuple[Message, ...]:
    """Messages in the form of chat APIs, or of ShareGPT (`from`, `value`)."""
    place = f"{where}: field '{field}'"
    items = value if isinstance(value, list | tuple) else ()
    if any(isinstance(item, Mapping) and "from" in item for item in items):
        return conversation(value, place)
    return messages_from_json(value, place)


def tools_of(line: JsonRow) -> tuple[ToolSchema, ...]:
    return tools_from_json(line.values.get("tools"), f"{line.where}: field 'tools'")


def dialogue(text: str, where: str) -> tuple[Message, ...]:
    """The turns of a text such as "\\n\\nHuman: Hi\\n\\nAssistant: Hello", without white space
    around each; turns of one speaker in a row are one message."""
    _, *parts = _TURN.split(text.lstrip("\n"))
    turns: list[Message] = []
    for speaker, said in zip(parts[::2], parts[1::2], strict=True):
        role: Literal["user", "assistant"] = "user" if speaker == "Human" else "assistant"
        if turns and turns[-1].role == role:
            said = f"{turns.pop().content}\n\n{said.strip()}"
        turns.append(Message(role, said.strip()))
    if not turns:
        raise DataError(f"{where} has no turn of 'Human:' or 'Assistant:': correct this line")
    return tuple(turns)


def _shared_text(
    chosen: str, rejected: str, where: str
) -> tuple[tuple[Message, ...], object, object]:
    """The prompt that two texts begin with, up to a whole word, and what follows it in each."""
    text = _whole_words(os.path.commonprefix([chosen, rejected]), chosen, rejected).rstrip()
    if not text:
        raise _no_prompt(where)
    return (Message("user", text),), _after(text, chosen), _after(text, rejected)


def _after(prompt: str, text: str) -> str:
    """What follows the prompt, without the one white space character that separates them."""
    rest = text[len(prompt) :]
    return rest[1:] if rest[:1].isspace() else rest


def _whole_words(shared: str, *texts: str) -> str:
    """`shared`, which all `texts` begin with, without a word that it would cut in two."""
    following = [text[len(shared) : len(shared) + 1] for text in texts]
    ends_there = all(character.isspace() for character in following)
    if ends_there or not shared or shared[-1].isspace():
        return shared
    return shared[: -len(shared.split()[-1])]


# --- numbers --------------------------------------------------------------------------------------


def finite(value: object) -> float | None:
    """A number of sane size, also as text; None for anything else."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not -LARGEST_MARGIN <= value <= LARGEST_MARGIN or not math.isfinite(value):
        return None
    return float(value)


def number_of(line: JsonRow, name: str) -> float:
    value = line.values.get(name)
    is_cell = re.search(r"\.(csv|tsv)(\.gz)?:\d+$", line.where)  # every cell of these is text
    found = finite(value) if is_cell or not isinstance(value, str) else None
    if found is None:
        raise DataError(
            f"{line.where}: field '{name}' is {short(line.values.get(name))}, expected a "
            f"number of at most {LARGEST_MARGIN}: correct this line"
        )
    return found


def margin_of(line: JsonRow) -> float:
    """By how much chosen is better: a column of its own, or the difference of two scores."""
    if line.values.get("margin") is not None:
        return number_of(line, "margin")
    for better, worse in SCORE_PAIRS:
        if line.values.get(better) is not None and line.values.get(worse) is not None:
            return number_of(line, better) - number_of(line, worse)
    return 0.0
