"""Answers cut into steps with a label each: what a process reward model is trained on."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from posttrain.core.data.lengths import LengthRule
from posttrain.core.data.messages import messages_from_json
from posttrain.core.data.rows import data_rows, each_row
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import DataError
from posttrain.core.math.splits import text_key
from posttrain.core.runtime.json_files import JsonRow
from posttrain.core.types import Problem

NEAR = 8  # tokens without a character of their own that a text may begin with
EXAMPLE = '{"prompt": "...", "completions": ["first step", "second"], "labels": [true, false]}'


@dataclass(frozen=True, slots=True)
class StepRow:
    """One answer: step j ends at token `places[j]` of `response_ids`, and is right with probability
    `labels[j]`. `key` is what the question is known by."""

    key: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    places: tuple[int, ...]
    labels: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StepPlaces:
    """What a model reads of an answer, the last token of each step in it, and the character after
    each step in the text."""

    ids: tuple[int, ...]
    places: tuple[int, ...]
    ends: tuple[int, ...]


def step_ends(text: str, separator: str) -> tuple[int, ...]:
    """The character after each step of `text`, its separator included; blank steps are none."""
    ends, start = [], 0
    while start < len(text):
        found = text.find(separator, start)
        end = len(text) if found < 0 else found + len(separator)
        if text[start : end if found < 0 else found].strip():
            ends.append(end)
        start = end
    return tuple(ends)


def ending_token(ids: Sequence[int], end: int, tokenizer: ChatTokenizer) -> int | None:
    """Index of the first token after which the decoded text has `end` characters; None: never.

    Tokens and characters need not align, so prefixes are decoded, by bisection. Replacement
    characters at a prefix's end stand for a character of which some bytes are missing: not counted.
    """

    def reached(count: int) -> int:
        return len(tokenizer.decode_response(ids[:count]).rstrip("\ufffd"))

    count = bisect_left(range(len(ids) + 1), end, key=reached)
    return count - 1 if 0 < count <= len(ids) else None


def last_turn(ids: Sequence[int], text: str, tokenizer: ChatTokenizer) -> int | None:
    """Where the last tokens of `ids` begin that decode to `text`, the last turn; None: nowhere.

    By bisection, as suffixes are longer the earlier they begin. Replacement characters at a
    suffix's beginning stand for a character of which some bytes are missing: not counted.
    """

    def decoded(count: int) -> str:
        return tokenizer.decode_response(ids[len(ids) - count :])

    def reached(count: int) -> int:
        return len(decoded(count).lstrip("\ufffd"))

    if decoded(len(ids)) == text:
        return 0
    first = bisect_left(range(len(ids) + 1), len(text.lstrip("\ufffd")), key=reached)
    near = range(first, min(first + NEAR, len(ids)) + 1)
    return next((len(ids) - count for count in near if decoded(count) == text), None)


def step_places(
    text: str, ids: Sequence[int], separator: str, tokenizer: ChatTokenizer
) -> StepPlaces:
    """The steps of the answer `text`, whose tokens are `ids`; without any where it has none.

    The last step's separator is put in if the answer has none, since a model that is trained on
    separators learns nothing elsewhere.
    """
    ends = step_ends(text, separator)
    if not ends:
        return StepPlaces(tuple(ids), (), ())
    found = [ending_token(ids, end, tokenizer) for end in ends]
    places = [len(ids) - 1 if place is None else place for place in found]
    read = tuple(ids)
    if not text[: ends[-1]].endswith(separator):
        read = (*read[: places[-1] + 1], *tokenizer.encode_text(separator, special=True))
        places[-1] = len(read) - 1
    return StepPlaces(read, tuple(places), ends)


@dataclass(frozen=True, slots=True)
class LabelledSteps:
    """A row of a file: a problem and the steps of an answer, each right or wrong."""

    problem: Problem
    steps: tuple[str, ...]
    labels: tuple[float, ...]

    def tokenised(self, separator: str, tokenizer: ChatTokenizer) -> StepRow:
        """The answer as one text, with a separator after each step."""
        text = "".join(f"{step}{separator}" for step in self.steps)
        ids = tokenizer.encode_text(text, special=True)
        found = step_places(text, ids, separator, tokenizer)
        prompt = tokenizer.encode_prompt(self.problem)
        return StepRow(self.problem.key, prompt, found.ids, found.places, self.labels)


def read_labelled_steps(source: str, setting: str, separator: str) -> list[LabelledSteps]:
    """Rows with `prompt`, `completions` and `labels`, as TRL's process reward models take them.

    Raises `DataError` that names file, row and field.
    """
    found = list(each_row(data_rows(source, setting), partial(_row, separator=separator)))
    if not found:
        raise DataError(f"{source} has no rows; expected rows like {EXAMPLE}")
    return found


def _row(row: JsonRow, separator: str) -> LabelledSteps:
    def wrong(what: str) -> DataError:
        return DataError(f"{row.where}: {what}; expected a row like {EXAMPLE}")

    prompt, steps, labels = (row.values.get(name) for name in ("prompt", "completions", "labels"))
    if not isinstance(steps, list) or not steps or not all(isinstance(s, str) for s in steps):
        raise wrong("`completions` is not a list of texts, one for each step")
    if not isinstance(labels, list) or len(labels) != len(steps):
        count = len(labels) if isinstance(labels, list) else "no"
        raise wrong(f"there are {len(steps)} steps and {count} labels")
    for number, step in enumerate(steps):
        if not step.strip() or separator in step:
            what = "is blank" if not step.strip() else f"holds the separator {separator!r}"
            raise wrong(f"step {number + 1} {what}")
    values = [_label(label) for label in labels]
    if None in values:
        raise wrong(f"label {labels[values.index(None)]!r} is not true, false or from 0 to 1")
    known = tuple(value for value in values if value is not None)
    if isinstance(prompt, str):
        if not prompt.strip():
            raise wrong("`prompt` is blank")
        problem = Problem(text_key(prompt), prompt, "", "")
    elif isinstance(prompt, list):
        messages = messages_from_json(prompt, f"{row.where}: prompt")
        text = "\n".join(message.content for message in messages)
        problem = Problem(text_key(text), text, "", "", messages=messages)
    else:
        raise wrong("`prompt` is neither a text nor messages")
    return LabelledSteps(problem, tuple(steps), known)


def _label(value: object) -> float | None:
    """true, false, or a probability; None for anything else."""
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, int | float) and 0 <= value <= 1:
        return float(value)
    return None


def fitting_rows(rows: Sequence[StepRow], rule: LengthRule) -> list[StepRow]:
    """Rows that fit, cut or left out by `rule`; of one that is cut, the steps that are whole."""
    found = []
    for row in rows:
        room = rule.answer_room(f"{row.key[:60]!r}", len(row.prompt_ids), len(row.response_ids))
        if room is None:
            continue
        whole = sum(place < room for place in row.places)
        if whole == 0:
            rule.leave_out()
            continue
        places, labels = row.places[:whole], row.labels[:whole]
        response = row.response_ids[:room]
        found.append(replace(row, response_ids=response, places=places, labels=labels))
    return found
