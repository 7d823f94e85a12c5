"""Preference data as TRL has them, read from JSON Lines: pairs, or single answers with a label.

| kind | a line |
|---|---|
| pairs | `{"prompt": P, "chosen": A, "rejected": A}`, optionally with a number `margin` |
| pairs, implicit prompt | `{"chosen": C, "rejected": C}`: the prompt is what both begin with |
| labels | `{"prompt": P, "completion": A, "label": true}` |
| completions | `{"prompt": P, "completion": A}`: no preference, for supervised learning |

P is text (one user message) or a list of chat messages `{"role": ..., "content": ...}`; A is text
or a list of one assistant message; C is text or a whole chat. Other fields are ignored.
Importing this module needs no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from posttrain.core.errors import DataError
from posttrain.core.math.splits import text_key
from posttrain.core.runtime.json_files import JsonRow, read_json_lines

LARGEST_MARGIN = 1_000_000
Message = dict[str, str]
"""A chat message: `role` and `content`."""

Kind = Literal["pairs", "labels", "completions"]
EXAMPLES: dict[str, str] = {
    "pairs": '{"prompt": ..., "chosen": ..., "rejected": ...}',
    "labels": '{"prompt": ..., "completion": ..., "label": true}',
    "completions": '{"prompt": ..., "completion": ...}',
}


@dataclass(frozen=True, slots=True)
class PreferenceRow:
    """One line: a prompt (chat messages) and its `answers`, texts of one assistant turn each.

    A pair has two answers, chosen first, and may have a `margin`; any other row has one. `key` is
    the same for the same prompt, as a text or as a chat.
    """

    where: str
    prompt: tuple[Message, ...]
    answers: tuple[str, ...]
    margin: float = 0.0
    label: bool | None = None

    @property
    def key(self) -> str:
        return text_key("\n".join(f"{m['role']}: {m['content']}" for m in self.prompt))


def read_preference_rows(
    path: Path, setting: str, kinds: Sequence[Kind]
) -> tuple[Kind, list[PreferenceRow]]:
    """All rows of the file and their kind, which must be one of `kinds` and the same throughout."""
    wanted = " or ".join(EXAMPLES[kind] for kind in kinds)
    lines = read_json_lines(path, setting, wanted)
    found: list[tuple[Kind, PreferenceRow]] = [_row(line, wanted) for line in lines]
    kind = found[0][0]
    for (other, row), line in zip(found, lines, strict=True):
        if other not in kinds:
            raise DataError(
                f"{line.where} has the fields {sorted(line.values)}, expected {wanted}: rename "
                "the fields or give another file"
            )
        if other != kind:
            raise DataError(
                f"{lines[0].where} is of the form {EXAMPLES[kind]} and {row.where} of the form "
                f"{EXAMPLES[other]}, expected one form throughout: split the file"
            )
    return kind, [row for _, row in found]


ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


def doubtful(rows: Sequence[PreferenceRow]) -> list[str]:
    """A sentence for each kind of row that can be trained on and is probably a mistake, counted.

    Rows that occur again, rows that contradict one another, and messages of roles that chat
    templates do not know.
    """
    first: dict[tuple[object, ...], PreferenceRow] = {}
    again: list[tuple[PreferenceRow, PreferenceRow]] = []
    against: list[tuple[PreferenceRow, PreferenceRow]] = []
    for row in rows:
        prompt = json.dumps(row.prompt)
        same = (prompt, row.answers, row.label)
        other = (prompt, row.answers[::-1], None if row.label is None else not row.label)
        if same in first:
            again.append((row, first[same]))
        elif other in first and (len(row.answers) == 2 or row.label is not None):
            against.append((row, first[other]))
        first.setdefault(same, row)
    odd = [(row, role) for row in rows for role in sorted({m["role"] for m in row.prompt} - ROLES)]
    found = []
    for pairs, reported in (
        (against, "say the opposite of an earlier row about the same answers"),
        (again, "occur again as they are"),
    ):
        if pairs:
            row, earlier = pairs[0]
            found.append(
                f"{len(pairs)} of {len(rows)} rows {reported}, such as {row.where} and "
                f"{earlier.where}"
            )
    if odd:
        row, role = odd[0]
        found.append(
            f"{len({row.where for row, _ in odd})} of {len(rows)} rows have messages of roles "
            f"other than {sorted(ROLES)}, such as {role[:40]!r} in {row.where}"
        )
    return found


def preference_digest(rows: Sequence[PreferenceRow]) -> str:
    values = [[row.prompt, row.answers, row.margin, row.label] for row in rows]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def _row(line: JsonRow, wanted: str) -> tuple[Kind, PreferenceRow]:
    names = set(line.values)
    pair, single = names & {"chosen", "rejected"}, "completion" in names
    if len(pair) == 2 and not single:
        return "pairs", _pair(line)
    if single and not pair:
        return ("labels" if "label" in names else "completions"), _single(line)
    raise DataError(
        f"{line.where} has the fields {sorted(names)}, expected {wanted}: rename the fields or "
        "correct this line"
    )


def _pair(line: JsonRow) -> PreferenceRow:
    chosen, rejected = line.values["chosen"], line.values["rejected"]
    if line.values.get("prompt") is None:
        prompt, chosen, rejected = _shared_prompt(chosen, rejected, line.where)
    else:
        prompt = _prompt(line)
    answers = _answer(chosen, "chosen", line.where), _answer(rejected, "rejected", line.where)
    if answers[0] == answers[1]:
        raise DataError(
            f"{line.where}: 'chosen' and 'rejected' are the same answer {answers[0][:40]!r}, which "
            "says nothing about either: remove this line"
        )
    return PreferenceRow(line.where, prompt, answers, margin=_margin(line))


def _single(line: JsonRow) -> PreferenceRow:
    label = line.values.get("label")
    if label is not None and not isinstance(label, bool):
        raise DataError(
            f"{line.where}: field 'label' is {label!r} ({type(label).__name__}), expected true "
            "(desirable) or false: correct this line"
        )
    if "label" in line.values and label is None:
        raise DataError(f"{line.where}: field 'label' is null, expected true or false: fill it in")
    answer = _answer(line.values["completion"], "completion", line.where)
    return PreferenceRow(line.where, _prompt(line), (answer,), label=label)


def _margin(line: JsonRow) -> float:
    value = line.values.get("margin")
    if value is None:
        return 0.0
    number = not isinstance(value, bool) and isinstance(value, int | float)
    if not number or not -LARGEST_MARGIN <= value <= LARGEST_MARGIN:  # type: ignore[operator]
        raise DataError(
            f"{line.where}: field 'margin' is {_short(value)}, expected a "
            f"number of at most {LARGEST_MARGIN}: correct this line"
        )
    return float(value)  # type: ignore[arg-type]


def _prompt(line: JsonRow) -> tuple[Message, ...]:
    value = line.values.get("prompt")
    if isinstance(value, str) and value.strip():
        return ({"role": "user", "content": value},)
    if not isinstance(value, list) or not value:
        raise DataError(
            f"{line.where}: field 'prompt' is {_short(value)}, expected non-empty text or a list "
            "of chat messages: correct this line"
        )
    return _messages(value, "prompt", line.where)


def _answer(value: object, field: str, where: str) -> str:
    if isinstance(value, list):
        messages = _messages(value, field, where)
        if [message["role"] for message in messages] != ["assistant"]:
            raise DataError(
                f"{where}: field '{field}' holds messages of {[m['role'] for m in messages]} after "
                "the prompt, expected one assistant message: put the earlier ones into 'prompt'"
            )
        value = messages[0]["content"]
    if not isinstance(value, str) or not value.strip():
        raise DataError(
            f"{where}: field '{field}' is {_short(value)}, expected non-empty text or one "
            "assistant message: correct this line"
        )
    return value


def _messages(value: list[object], field: str, where: str) -> tuple[Message, ...]:
    messages = []
    for number, item in enumerate(value):
        if not (
            isinstance(item, dict)
            and set(item) == {"role", "content"}
            and all(isinstance(part, str) for part in item.values())
        ):
            raise DataError(
                f"{where}: field '{field}', message {number}, is {_short(item)}, expected "
                '{"role": <text>, "content": <text>} and nothing else: correct this line'
            )
        messages.append(dict(item))
    return tuple(messages)


def _shared_prompt(
    chosen: object, rejected: object, where: str
) -> tuple[tuple[Message, ...], object, object]:
    """The prompt that two whole conversations, or two texts, begin with, and what follows it."""
    if isinstance(chosen, list) and isinstance(rejected, list):
        shared = 0
        for left, right in zip(chosen, rejected, strict=False):
            if left != right:
                break
            shared += 1
        prompt: tuple[Message, ...] = _messages(chosen[:shared], "chosen", where)
        rest: tuple[object, object] = chosen[shared:], rejected[shared:]
    elif isinstance(chosen, str) and isinstance(rejected, str):
        text = _whole_words(os.path.commonprefix([chosen, rejected]), chosen, rejected)
        text = text.rstrip()
        rest = _after(text, chosen), _after(text, rejected)
        prompt = ({"role": "user", "content": text},) if text else ()
    else:
        raise DataError(
            f"{where}: 'chosen' and 'rejected' are {_short(chosen)} and {_short(rejected)}, "
            "expected two texts or two lists of chat messages: correct this line"
        )
    if not prompt:
        raise DataError(
            f"{where} has no 'prompt', and 'chosen' and 'rejected' begin differently, so none can "
            "be read from them: add 'prompt'"
        )
    return prompt, *rest


def _after(prompt: str, text: str) -> str:
    """What follows the prompt, without the one white space character that separates them."""
    rest = text[len(prompt) :]
    return rest[1:] if rest[:1].isspace() else rest


def _whole_words(shared: str, *texts: str) -> str:
    """`shared`, which all `texts` begin with, without a word that it would cut in two."""
    following = [text[len(shared) : len(shared) + 1] for text in texts]
    if all(character.isspace() for character in following):
        return shared
    if not shared or shared[-1].isspace():
        return shared
    return shared[: -len(shared.split()[-1])]


def _short(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
