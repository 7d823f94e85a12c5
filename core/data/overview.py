"""What the rows of a data file are taken for, and what a stage would learn from them."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Literal

import yaml

from posttrain.core.contracts.preference_rows import PreferenceRow
from posttrain.core.data.formats import Example, Format, recognise
from posttrain.core.data.messages import chat_text, message_to_json
from posttrain.core.data.preference import encode_row
from posttrain.core.data.preference_cells import PROMPTS
from posttrain.core.data.preference_files import LISTS, SCORES, Form, form_of, rows_of
from posttrain.core.data.row_task import MISSING, VERL, RowConfig, lookup, problem_of
from posttrain.core.data.rows import data_rows
from posttrain.core.data.sft_rows import encode_example
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import DataError
from posttrain.core.math.numbers import is_number
from posttrain.core.math.splits import text_key
from posttrain.core.runtime.json_files import JsonRow

Purpose = Literal["sft", "rl", "preference"]
Pieces = tuple[tuple[str, bool], ...]
"""Texts in order, each with whether it is learned."""

QUESTIONS = ("prompt", "question", "problem", "query", "instruction")
ANSWERS = ("answer", "solution", "ground_truth", "final_answer", "target")
PREFERENCE_COLUMNS = frozenset(
    {
        *("chosen", "rejected", "completion", "label", "response", "response_1", "response_2"),
        *("preference_strength", *PROMPTS, *LISTS, *SCORES),
    }
)
SETTING = "the file that is named"
MOST_PROBLEMS = 20
"""Rows with problems that are kept; all are counted."""


@dataclass(frozen=True, slots=True)
class Conversation(Example):
    """An example with a `name`, where its row has several. Of prompts `answer` is their length."""

    name: str = ""

    @property
    def learned(self) -> tuple[bool, ...]:
        """Whether each message is learned."""
        return tuple(
            number >= self.answer and message.role == "assistant" and message.train
            for number, message in enumerate(self.messages)
        )


@dataclass(frozen=True, slots=True)
class Look:
    """A row as its stage sees it: one conversation, or a chosen and a rejected one.

    Rows with one `key` are the same, and contradict one another if their `answer` differs.
    """

    where: str
    conversations: tuple[Conversation, ...]
    key: str
    answer: str = ""
    judged_by: str = ""


@dataclass(frozen=True, slots=True)
class Taken:
    """What a row was taken for: by which columns, how a config names it, and how it is read."""

    purpose: Purpose
    format: str
    why: str
    use: str
    read: Callable[[JsonRow], Look]


def taken_for(row: JsonRow, source: str) -> Taken:
    """What a row is by its columns; raises `DataError` that lists what it could be."""
    names = {name for name, value in row.values.items() if value is not None}
    if lookup(row.values, VERL["answer"]) is not MISSING and "prompt" in names:
        return _prompts(RowConfig(), row, source, "it has prompt and reward_model.ground_truth")
    preference = _preference_form(row)
    if preference is not None:
        columns = ", ".join(sorted(names & PREFERENCE_COLUMNS))
        use, read = _stage("preference", source), partial(_preference, preference)
        return Taken("preference", preference.name, f"it has {columns}", use, read)
    try:
        form = recognise(row)
    except DataError as error:
        question = next((name for name in QUESTIONS if name in names), None)
        if question is None:
            raise DataError(
                f"{error}; for RL a row needs a prompt, such as one of {', '.join(QUESTIONS)}, and "
                "for preferences 'chosen' and 'rejected'"
            ) from error
        answer = next((name for name in ANSWERS if name in names), None)
        config = RowConfig.model_validate(_fields(row, question, answer))
        others = ", ".join(sorted(names - {question}))
        ask = f" (of {others}, one may be: name it as task.answer_field)" if others else ""
        also = f" and {answer}" if answer else f" and no answer{ask}"
        return _prompts(config, row, source, f"it has {question}{also}")
    columns = " and ".join(sorted("/".join(sorted(need & names)) for need in form.needs))
    use = _stage("sft", source)
    return Taken("sft", form.name, f"it has {columns}", use, partial(_example, form))


def _preference_form(row: JsonRow) -> Form | None:
    try:
        form = form_of(row, "a preference")
    except DataError:
        return None
    return None if form.kind == "completions" else form


def _stage(kind: str, source: str) -> str:
    return _in_yaml({"stages": {kind: {"kind": kind, "inputs": {"model": "base"}, "data": source}}})


def _in_yaml(values: dict[str, object]) -> str:
    """One line of YAML."""
    text: str = yaml.safe_dump(values, default_flow_style=True, sort_keys=False, width=10**6)
    return text.strip().removeprefix("{").removesuffix("}")


def _fields(row: JsonRow, question: str, answer: str | None) -> dict[str, object]:
    """The settings of a task that reads the row's answer."""
    value = "" if answer is None else str(row.values[answer])
    match = "last_number"
    if answer is not None and not is_number(value):
        match = "math" if "\\" in value else "final_number" if "####" in value else "exact"
    made: dict[str, object] = {"prompt_field": question, "answer_field": answer, "match": match}
    defaults = {name: RowConfig.model_fields[name].default for name in made}
    return {name: item for name, item in made.items() if item != defaults[name]}


def _prompts(config: RowConfig, row: JsonRow, source: str, why: str) -> Taken:
    layout = config.layout(row.values)
    fields = {"name": "rows", "path": source, **config.model_dump(exclude_unset=True)}
    use = _in_yaml({"task": fields})

    def read(one: JsonRow) -> Look:
        problem = problem_of(one, config, layout)
        messages = problem.messages
        said = Conversation(one.where, messages, problem.tools, answer=len(messages))
        match = problem.metadata.get("match", config.match)
        return Look(one.where, (said,), problem.key, problem.answer, match)

    kind = "prompts without answers" if layout.answer is None else "prompts with answers"
    return Taken("rl", f"{layout.format} ({kind})", why, use, read)


def _example(form: Format, row: JsonRow) -> Look:
    example = form.read(row)
    said = Conversation(
        example.where, example.messages, example.tools, example.text, example.answer
    )
    if not (said.text or any(said.learned)):
        raise DataError(f"{row.where} has no assistant message to learn from: it is left out")
    return Look(row.where, (said,), text_key(said.text or chat_text(said.messages, said.tools)))


def _preference(form: Form, row: JsonRow) -> Look:
    """The first pair, or the only answer, of the row."""
    found = rows_of(row, form)[0]
    if found.label is not None:
        names = ["desirable" if found.label else "undesirable"]
    else:
        names = ["chosen", "rejected"] if len(found.answers) > 1 else ["rated"]
    first = len(found.prompt)
    made = []
    for name, answer in zip(names, found.answers, strict=True):
        said = (*found.prompt, *answer)
        made.append(Conversation(row.where, said, found.tools, answer=first, name=name))
    key = "\n\n".join((*names, *(chat_text(side.messages, side.tools) for side in made)))
    return Look(row.where, tuple(made), text_key(key))


# --- all rows ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Overview:
    """All rows of a source. `chars` and `tokens` are a length for each readable row.

    `problems` are sentences about rows that a stage would refuse or leave out; `duplicates` counts
    rows that occurred before, such as `duplicate`.
    """

    source: str
    taken: Taken
    rows: int = 0
    shown: list[Look] = field(default_factory=list)
    chars: array[int] = field(default_factory=lambda: array("q"))
    tokens: array[int] = field(default_factory=lambda: array("q"))
    learned: int = 0
    duplicates: int = 0
    duplicate: str = ""
    num_problems: int = 0
    problems: list[str] = field(default_factory=list)

    def problem(self, text: str) -> None:
        self.num_problems += 1
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(text)


def overview(source: str, rows: int, tokenizer: ChatTokenizer | None) -> Overview:
    """Read the whole source; `rows` of it are kept to be shown. A damaged file is a `DataError` if
    no row can be read, else the last problem."""
    found = data_rows(source, SETTING)
    first = next(found)
    made = Overview(source, taken_for(first, source))
    seen: dict[bytes, tuple[str, str]] = {}
    columns: set[frozenset[tuple[str, str]]] = set()
    row: JsonRow | None = first
    while row is not None:
        made.rows += 1
        try:
            names = {(n, type(v).__name__) for n, v in row.values.items() if v is not None}
            if frozenset(names) not in columns:
                _check_same(made.taken, first, row, source)
                columns.add(frozenset(names))
            look = made.taken.read(row)
            _count(made, look, tokenizer)
            _compare(made, look, seen)
        except DataError as error:
            made.problem(str(error))
        else:
            if len(made.shown) < rows:
                made.shown.append(look)
        try:
            row = next(found, None)
        except DataError as error:
            made.problem(str(error))
            return made
    return made


def _check_same(taken: Taken, first: JsonRow, row: JsonRow, source: str) -> None:
    other = taken_for(row, source)
    if (other.purpose, other.format) != (taken.purpose, taken.format):
        raise DataError(
            f"{first.where} is of the format {taken.format} ({taken.why}) and {row.where} of "
            f"{other.format} ({other.why}), expected one format: put them into two files"
        )


def _count(made: Overview, look: Look, tokenizer: ChatTokenizer | None) -> None:
    if tokenizer is not None:
        encoded = [encoded_of(said, tokenizer, made.taken.purpose) for said in look.conversations]
        made.tokens.append(max(len(ids) for ids, _ in encoded))
        made.learned += sum(sum(mask) for _, mask in encoded)
    made.chars.append(max(_chars(said) for said in look.conversations))


def _compare(made: Overview, look: Look, seen: dict[bytes, tuple[str, str]]) -> None:
    digest = hashlib.sha256(look.key.encode("utf-8", "surrogatepass")).digest()[:16]
    where, answer = seen.setdefault(digest, (look.where, look.answer))
    if where == look.where:
        return
    made.duplicates += 1
    made.duplicate = made.duplicate or f"{look.where} repeats {where}"
    if answer != look.answer:
        raise DataError(
            f"{where} and {look.where} give one prompt the answers {answer[:60]!r} and "
            f"{look.answer[:60]!r}, expected one answer: remove one of them"
        )


def _chars(said: Conversation) -> int:
    return sum(len(text) for text, _ in text_pieces(said))


def text_pieces(said: Conversation) -> Pieces:
    """The conversation without a model: a line with the role, then the text of each message."""
    if said.text:
        return ((said.text, True),)
    made: list[tuple[str, bool]] = []
    if said.tools:
        made.append((f"tools: {json.dumps(list(said.tools), ensure_ascii=False)}\n", False))
    for message, learned in zip(said.messages, said.learned, strict=True):
        values = message_to_json(message)
        calls = values.get("tool_calls")
        texts = [message.reasoning, message.content, json.dumps(calls) if calls else ""]
        made.append((f"{message.role}: ", False))
        made.append((" ".join(filter(None, texts)), learned))
        made.append(("\n", False))
    return tuple(made[:-1])


Encoded = tuple[tuple[int, ...], tuple[bool, ...]]
"""Token ids, and whether each is learned."""


def encoded_of(said: Conversation, tokenizer: ChatTokenizer, purpose: Purpose) -> Encoded:
    """The tokens that a stage makes of the conversation."""
    messages, first = said.messages, said.answer
    if purpose == "rl":
        try:
            ids = tokenizer.encode_chat(messages, said.tools)
        except DataError as error:
            raise DataError(f"{said.where}: {error}") from error
        return ids, (False,) * len(ids)
    if purpose == "preference":
        row = PreferenceRow(said.where, messages[:first], (messages[first:],), tools=said.tools)
        ids, (answer,) = encode_row(row, tokenizer)
        learned = answer.learned or (True,) * len(answer.token_ids)
        return (*ids, *answer.token_ids), (*(False,) * len(ids), *learned)
    encoded = encode_example(tokenizer, said, "assistant")
    if encoded is None:
        return (), ()
    own = encoded.learned or (True,) * len(encoded.response)
    return (*encoded.prompt, *encoded.response), (*(False,) * len(encoded.prompt), *own)


def token_pieces(said: Conversation, tokenizer: ChatTokenizer, purpose: Purpose) -> Pieces:
    """The conversation as the model reads it, special tokens included."""
    ids, mask = encoded_of(said, tokenizer, purpose)
    runs = groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
    return tuple(
        (str(tokenizer.tokenizer.decode([token for token, _ in run])), learned)
        for learned, run in runs
    )


def spread(lengths: Sequence[int]) -> dict[str, int]:
    """Smallest, median, 95 % and largest of some lengths; empty of none."""
    ordered = sorted(lengths)
    if not ordered:
        return {}
    last = len(ordered) - 1
    places = {"min": 0, "median": last // 2, "p95": round(0.95 * last), "max": last}
    return {name: ordered[place] for name, place in places.items()}
