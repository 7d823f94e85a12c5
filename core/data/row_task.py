"""Tasks whose problems are rows with a prompt and an answer."""

from __future__ import annotations

import json
import math
import random
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Literal, TypeVar, cast

from pydantic import Field, field_validator

from posttrain.core.contracts import PluginConfig, Task
from posttrain.core.data.formats import parsed_cell
from posttrain.core.data.messages import chat_text, messages_from_json, short, tools_from_json
from posttrain.core.data.problem_sets import problems_digest
from posttrain.core.data.rows import each_row
from posttrain.core.data.verifiers import (
    DEFAULT,
    MATCHES,
    NUMERIC,
    Match,
    verdict,
    verifier_of,
)
from posttrain.core.errors import DataError
from posttrain.core.math.answers import only_number_after
from posttrain.core.math.numbers import is_number
from posttrain.core.math.splits import split_of, text_key, too_few
from posttrain.core.runtime.json_files import JsonRow, NotJson, loads
from posttrain.core.store.manifests import combine_digests, file_digest
from posttrain.core.types import Message, Problem, Split, ToolSchema, Verdict

Format = Literal["auto", "plain", "trl", "verl"]
VERL = {
    "answer": "reward_model.ground_truth",
    "data_source": "data_source",
    "index": "extra_info.index",
}
TRL_ANSWERS = ("answer", "solution", "ground_truth")
"""Where data sets for TRL's trainers have the answer that their rewards read."""
CHATS = ("messages", "conversations", "conversation", "chat")
"""Fields that usually hold whole conversations, with the answer that is to be found."""


class RowConfig(PluginConfig):
    """Which fields of a row are what, how answers are compared, what is held out.

    A dotted name reaches into objects and lists: `extra_info.index`, `turns.0.text`.
    """

    format: Format = Field(
        default="auto",
        description="verl: prompt, reward_model.ground_truth, data_source and extra_info; trl: "
        "prompt, and an answer if there is one; plain: the fields named below; auto: what the "
        "rows look like",
    )
    prompt_field: str = Field(
        default="prompt", min_length=1, description="the question: text, or a list of messages"
    )
    answer_field: str | None = Field(
        default="answer",
        min_length=1,
        description="text or a number; null = rows without answers, whose rewards must not need "
        "any",
    )
    worked_field: str | None = Field(
        default=None, description="what supervised fine-tuning imitates; null = the answer"
    )
    tools_field: str = Field(
        default="tools",
        min_length=1,
        description="the tools of a row, as JSON schemas, where the field is there",
    )
    metadata_fields: tuple[str, ...] = Field(
        default=(), description="more fields that rewards read from the problem's metadata"
    )
    match: Match = Field(
        default="last_number",
        description="exact: the whole response; last_number: its last number, by value; "
        "final_number: the number after ####, else in \\boxed{}, else the last (an answer may have "
        "#### as well); contains: the answer occurs in it; math: its final answer, as mathematics; "
        "none: no verdict",
    )
    verifiers: dict[str, Match] = Field(
        default_factory=dict,
        description="the match for each data_source, such as {openai/gsm8k: last_number, "
        "my_*: exact, default: math}; well-known ones need none",
    )
    held_out_permille: int = Field(
        default=100,
        ge=1,
        le=999,
        description="of 1000 problems, unless the held-out ones are given apart",
    )

    @field_validator("metadata_fields")
    @classmethod
    def _not_ours(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        taken = sorted({"match", "source"} & set(value))
        if taken:
            raise ValueError(f"'{taken[0]}' is a name that the task itself sets: leave it out")
        return value

    def layout(self, values: Mapping[str, object]) -> Layout:
        """Where a row has its fields."""
        prompt = parsed_cell(lookup(values, self.prompt_field), by=("role",))
        answer = self.answer_field
        found = self.format
        if found == "auto":
            found = "trl" if isinstance(prompt, list | tuple) else "plain"
            named = answer is not None and lookup(values, answer) is not MISSING
            if not named and lookup(values, VERL["answer"]) is not MISSING:
                found = "verl"
        if found == "verl":
            own = None if answer is None else VERL["answer"]
            return Layout("verl", self.prompt_field, own, VERL["data_source"], VERL["index"])
        if found == "trl" and answer == RowConfig.model_fields["answer_field"].default:
            # The usual names are looked for; a name that the config gives must be there.
            there = [name for name in TRL_ANSWERS if lookup(values, name) is not MISSING]
            answer = there[0] if there else None
        source = "data_source" if self.verifiers else None
        return Layout(found, self.prompt_field, answer, source, "index")

    def columns(self, values: Mapping[str, object]) -> list[str]:
        """The columns of a table that are read, by its first row; none if a needed one is missing,
        so that the error names those there are."""
        layout = self.layout(values)
        needed = [layout.prompt, layout.answer, self.worked_field, *self.metadata_fields]
        if any(name is not None and lookup(values, name) is MISSING for name in needed):
            return []
        named = [*needed, layout.data_source, layout.index, self.tools_field, *MEDIA]
        heads = [n for name in named if name is not None for n in (name, name.partition(".")[0])]
        return list(dict.fromkeys(name for name in heads if name in values))


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a row has its fields. `answer` None: there is none; `data_source` None: not asked."""

    format: Format
    prompt: str
    answer: str | None
    data_source: str | None
    index: str

    def __str__(self) -> str:
        answer = f"answer in '{self.answer}'" if self.answer else "no answer"
        return f"{self.format} (prompt in '{self.prompt}', {answer})"


MEDIA = ("images", "image", "videos", "audios")


RowConfigT = TypeVar("RowConfigT", bound=RowConfig)
Found = dict[str, tuple[Problem, str]]
"""Problems by key, each with where its row is."""


class RowTask(Task[RowConfigT]):
    """Problems of rows. Formula: key = the prompt, in Unicode's NFC; of messages, a line for each.

    Held out are the rows given apart, or without them those with sha256(key) mod 1000 <
    held_out_permille. A prompt that occurs twice counts once, and a note says so; one prompt with
    two answers, or one that is on both sides, is a `DataError`. All rows are read, and checked,
    when the task is built; what stays in memory are the problems.
    """

    def __init__(self, config: RowConfigT) -> None:
        super().__init__(config)
        self._unjudged = ""
        self._repeated: list[str] = []
        self._other_worked: list[str] = []
        train, held_out = self.read()
        rows = self._read(train)
        self._splits: dict[Split, list[Problem]] = {"train": [], "held_out": []}
        if held_out is None:
            for key, (problem, _) in rows.items():
                self._splits[split_of(key, config.held_out_permille)].append(problem)
            return
        apart = self._read(held_out)
        for key in [key for key in rows if key in apart]:
            raise DataError(
                f"{rows[key][1]} and {apart[key][1]} hold the same prompt "
                f"{rows[key][0].prompt[:60]!r}, expected no overlap: remove it from one file"
            )
        self._splits["train"] = [problem for problem, _ in rows.values()]
        self._splits["held_out"] = [problem for problem, _ in apart.values()]

    @abstractmethod
    def read(self) -> tuple[Iterable[JsonRow], Iterable[JsonRow] | None]:
        """Training rows, and the held-out rows if they are given apart."""

    def files(self) -> list[Path]:
        """The files that are read; none when the rows come from elsewhere."""
        return []

    def unjudged(self, tasks: Collection[str] = ()) -> str:
        return self._unjudged

    def notes(self) -> list[str]:
        found = []
        if same := self._repeated:
            found.append(f"rows that repeat another one and count once: {len(same)} ({same[0]})")
        if other := self._other_worked:
            found.append(
                f"rows left out, since their prompt has a worked answer already: {len(other)} "
                f"({other[0]}); to imitate several, name the file as `data` of an sft stage"
            )
        return found

    def _read(self, given: Iterable[JsonRow]) -> Found:
        rows: Found = {}
        first: tuple[str, Layout] | None = None

        def read(row: JsonRow) -> None:
            nonlocal first
            layout = self.config.layout(row.values)
            # An error of the row itself says more than that it differs from others.
            problem = problem_of(row, self.config, layout)
            first = first or (row.where, layout)
            if layout != first[1]:
                raise DataError(
                    f"{first[0]} is {first[1]} and {row.where} is {layout}, expected one format in "
                    "all rows: put them into two files, or correct one of them"
                )
            if problem.metadata.get("match", self.config.match) == "none":
                self._unjudged = self._unjudged or row.where
            known = rows.setdefault(problem.key, (problem, row.where))
            if known[0].answer != problem.answer:
                raise DataError(
                    f"{known[1]} and {row.where} give one prompt the answers {known[0].answer!r} "
                    f"and {problem.answer!r}, expected one answer: remove one of the lines"
                )
            if known[0] is not problem:
                same = known[0].worked == problem.worked
                found = self._repeated if same else self._other_worked
                found.append(f"{row.where} repeats {known[1]}")

        for _ in each_row(given, read):
            pass
        return rows

    def rewritten(self, question: str, answer: str) -> Problem:
        """A problem of another wording, whose answer, a number, is read as the last number."""
        made = super().rewritten(question, answer)
        return Problem(made.key, made.prompt, answer, answer, {"match": "last_number"})

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        """`count` distinct rows of `split` in an order decided by `seed`."""
        rows = list(self._splits[split])
        if len(rows) < count:
            fix = "ask for fewer, add rows, or change how many are held out"
            raise too_few(self.name, split, count, len(rows), fix)
        # Every task of rows shuffles alike: the same rows in another format are the same run.
        random.Random(f"jsonl|{split}|{seed}").shuffle(rows)
        return rows[:count]

    def available(self, split: Split) -> int | None:
        return len(self._splits[split])

    def fingerprint(self) -> str:
        """Digest of the files, so that edited data are new data; else of what was read."""
        files = self.files()
        if files:
            return combine_digests({str(i): file_digest(path) for i, path in enumerate(files)})
        return problems_digest([p for rows in self._splits.values() for p in rows])

    def source(self) -> str:
        return ", ".join(str(path) for path in self.files())

    def verify(self, problem: Problem, text: str) -> Verdict:
        match = problem.metadata.get("match", self.config.match)
        return verdict(cast(Match, match), problem.answer, text)


def problem_of(row: JsonRow, config: RowConfig, layout: Layout) -> Problem:
    """The problem of a row. Raises `DataError` that names row, field and what to change."""
    where = row.where
    messages = _prompt(row, layout)
    tools = _tools(row, config.tools_field)
    metadata = _metadata(row, config, layout)
    answer, worked = _answer(row, config, layout, metadata)
    if config.worked_field is not None:
        worked = _text(row.values, config.worked_field, where, numbers=True)
    prompt = chat_text(messages, tools)
    return Problem(text_key(prompt), prompt, answer, worked, metadata, messages, tools)


def _tools(row: JsonRow, field: str) -> tuple[ToolSchema, ...]:
    given = lookup(row.values, field)
    if given is MISSING:
        return ()
    try:
        return tools_from_json(given, _place(row.where, field))
    except DataError as error:
        raise DataError(f"{error}, or name another field as task.tools_field") from error


def _metadata(row: JsonRow, config: RowConfig, layout: Layout) -> dict[str, str]:
    """Where the row stands, what its verifier is if not the task's, and the fields kept."""
    made = {"source": row.where}
    for name, field in (("data_source", layout.data_source), ("index", layout.index)):
        value = MISSING if field is None else lookup(row.values, field)
        if value is not MISSING and value is not None:
            made[name] = _as_text(value)
    for field in config.metadata_fields:
        made[field] = _as_text(_found(row.values, field, row.where))
    match = config.match
    if layout.answer is None:
        match = "none"
    elif layout.data_source is not None:
        match = _verifier(row, config, layout.data_source, made.get("data_source"))
    return made if match == config.match else made | {"match": match}


def _verifier(row: JsonRow, config: RowConfig, field: str, data_source: str | None) -> Match:
    if data_source is None and DEFAULT not in config.verifiers:
        _found(row.values, field, row.where)
    match = verifier_of(data_source or "", config.verifiers)
    if match is None:
        named = (data_source or "")[:80]
        raise DataError(
            f"{row.where}: no verifier is known for the data_source {named!r}, expected "
            f"one of {', '.join(MATCHES)}: set task.verifiers to {{{named}: exact}}, or "
            f"to {{{DEFAULT}: exact}} for every data set without one"
        )
    return match


def _answer(
    row: JsonRow, config: RowConfig, layout: Layout, metadata: dict[str, str]
) -> tuple[str, str]:
    """The answer, and what supervised learning imitates where the config names nothing else."""
    if layout.answer is None:
        return "", ""
    try:
        found = _found(row.values, layout.answer, row.where)
    except DataError as error:
        raise DataError(f"{error}; answer_field: null is for rows without answers") from error
    match = metadata.get("match", config.match)
    if match == "none":
        # What a reward reads instead, such as the tests of a program.
        answer = _as_text(found)
        metadata.setdefault("tests", answer)
        return answer, answer
    answer = worked = _text(row.values, layout.answer, row.where, numbers=True)
    if match == "final_number" and not is_number(answer):
        # GSM8K's own rows have the worked solution here.
        answer = (only_number_after(answer, "####") or answer).replace(",", "")
    if match in NUMERIC and not is_number(answer):
        raise DataError(
            f"{row.where}: field '{layout.answer}' is {answer[:60]!r}, expected a number "
            f"because the task matches the {match.replace('_', ' ')}: correct it, or set "
            "match: exact, contains or math"
        )
    return answer, worked


MISSING = object()


def lookup(values: object, name: str) -> object:
    """The value at a dotted name, `MISSING` if there is none; text on the way is read as JSON."""
    if isinstance(values, Mapping) and name in values:
        return values[name]
    head, dot, rest = name.partition(".")
    if isinstance(values, str) and values.lstrip()[:1] in ("{", "["):
        try:
            return lookup(loads(values), name)
        except NotJson:
            return MISSING
    if isinstance(values, list | tuple) and head.isdecimal() and int(head) < len(values):
        inner = values[int(head)]
        return lookup(inner, rest) if dot else inner
    if isinstance(values, Mapping) and dot and head in values:
        return lookup(values[head], rest)
    return MISSING


def _found(row: Mapping[str, object], field: str, where: str) -> object:
    value = lookup(row, field)
    if value is not MISSING:
        return value
    head = field.partition(".")[0]
    has = f"'{head}' is {short(row[head])}" if head in row and head != field else ""
    raise DataError(
        f"{where} has no field '{field}', {has or f'only {sorted(row)}'}: add it, or name another "
        "field in the task's settings"
    )


def _place(where: str, field: str) -> str:
    return f"{where}, '{field}'"


def _prompt(row: JsonRow, layout: Layout) -> tuple[Message, ...]:
    """The prompt as messages; text is one user message."""
    for name in MEDIA if layout.format != "plain" else ():
        if row.values.get(name) not in (None, [], "", {}):
            raise DataError(
                f"{row.where} has '{name}', expected text only: choose rows without them, or "
                "remove the column if the prompt does not need it"
            )
    value = parsed_cell(_found(row.values, layout.prompt, row.where), by=("role",))
    if not isinstance(value, list | tuple):
        return (Message("user", _text(row.values, layout.prompt, row.where, numbers=False)),)
    messages = messages_from_json(value, _place(row.where, layout.prompt))
    last = messages[-1]
    if last.role == "system":
        raise DataError(
            f"{_place(row.where, layout.prompt)} ends with a system message, expected a user's or "
            "a tool's to answer: correct this row"
        )
    if last.role == "assistant" and layout.prompt.rpartition(".")[2] in CHATS:
        raise DataError(
            f"{_place(row.where, layout.prompt)} ends with the assistant's answer, which the model "
            "would continue, expected a prompt that ends with a user's message: remove the last "
            "message, or name another prompt_field"
        )
    return messages


def _as_text(value: object) -> str:
    """Text as it is; anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _text(row: Mapping[str, object], field: str, where: str, *, numbers: bool) -> str:
    value = _found(row, field, where)
    # bool is an int in Python, but "True" is not an answer anyone wrote.
    number = isinstance(value, int | float | Decimal) and not isinstance(value, bool)
    if numbers and number and (isinstance(value, int) or math.isfinite(value)):  # type: ignore[arg-type]
        return str(value)
    if not isinstance(value, str) or not value.strip():
        allowed = f"non-empty text or a {'number' if numbers else 'list of messages'}"
        inside = f", or name what is in it, such as {field}.0" if isinstance(value, list) else ""
        raise DataError(
            f"{where}: field '{field}' is {repr(value)[:80]} ({type(value).__name__}), expected "
            f"{allowed}: correct this line{inside}"
        )
    return value
