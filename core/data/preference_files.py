"""Files of preferences in the forms that people have, recognised by their columns.

| form | columns |
|---|---|
| pairs | `prompt`, `chosen`, `rejected`; maybe `margin`, or a score of each answer |
| pairs, implicit prompt | `chosen`, `rejected`: the prompt is what both begin with |
| dialogues | `chosen`, `rejected` as texts of "\\n\\nHuman:" and "\\n\\nAssistant:" turns |
| compared answers | `prompt`, `response_1`, `response_2`, `preference_strength` |
| scored answers | `prompt`, `completions`: a list of `response` and `overall_score` |
| rated answers | `prompt`, `response` and a score, a row for each answer |
| labels | `prompt`, `completion`, `label`, or `messages`, `label` |
| completions | `prompt`, `completion`: no preference, for supervised learning |

A prompt is text (one user message) or a list of chat messages, an answer text or messages. `tools`,
`system` and other names of the prompt's column are read too; further columns are ignored.
Importing this module needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from posttrain.core.contracts.preference_rows import Answer, Kind, PreferenceRow, answer_text
from posttrain.core.data.formats import parsed_cell
from posttrain.core.data.messages import short
from posttrain.core.data.preference_cells import (
    HUMAN,
    PROMPTS,
    answer_of,
    chat_of,
    checked_answer,
    dialogue,
    finite,
    margin_of,
    number_of,
    prompt_and_answers,
    prompt_of,
    shared_turns,
    tools_of,
)
from posttrain.core.data.rows import data_rows, each_row
from posttrain.core.errors import DataError
from posttrain.core.runtime.json_files import JsonRow

Pairing = Literal["best_worst", "all"]
"""Which answers of one prompt make a pair, where each has a score."""

EXAMPLES: dict[str, str] = {
    "pairs": '{"prompt": ..., "chosen": ..., "rejected": ...}',
    "labels": '{"prompt": ..., "completion": ..., "label": true}',
    "completions": '{"prompt": ..., "completion": ...}',
}
SCORES = ("overall_score", "score", "rating", "helpfulness")
ANSWERS = ("response", "completion", "text", "content")
LISTS = ("completions", "generations", "responses")
LABELS: dict[str, bool] = {
    **{name: True for name in ("true", "1", "+1", "good", "desirable", "chosen")},
    **{name: False for name in ("false", "0", "-1", "bad", "undesirable", "rejected")},
}


class Form(NamedTuple):
    """What a file was taken for; all of its rows are of one form."""

    kind: Kind
    name: str
    prompt: str
    style: str

    def __str__(self) -> str:
        prompt = f"prompt in '{self.prompt}'" if self.prompt else "prompt not given apart"
        return f"{self.name} ({prompt}, {self.style})"


@dataclass(frozen=True, slots=True)
class PreferenceFile:
    """The rows of a file or folder. `left_out` counts the rows from which nothing can be learned,
    a sentence for each reason."""

    form: Form
    rows: list[PreferenceRow]
    left_out: tuple[str, ...] = ()

    @property
    def kind(self) -> Kind:
        return self.form.kind

    def report(self) -> str:
        """One line about what the file was taken for."""
        return f"read as {self.form}: {len(self.rows)} {self.kind}"

    def notes(self) -> list[str]:
        """What is left out, and what can be trained on and is probably a mistake."""
        return [*self.left_out, *doubtful(self.rows)]


def read_preference_rows(
    source: str | Path,
    setting: str,
    kinds: Sequence[Kind],
    pairing: Pairing = "best_worst",
) -> PreferenceFile:
    """All rows of the file or folder, whose kind must be one of `kinds`.

    Raises `DataError` that names file and row, and the first two rows that differ in form.
    """
    wanted = " or ".join(EXAMPLES[kind] for kind in kinds)
    first: tuple[JsonRow, Form, _Reader] | None = None

    def read(line: JsonRow) -> None:
        nonlocal first
        form = form_of(line, wanted)
        if first is None:
            if form.kind not in kinds:
                raise DataError(
                    f"{line.where} has the fields {sorted(line.values)}, expected {wanted}: rename "
                    "the fields or give another file"
                )
            first = (line, form, _Reader(form, pairing))
        elif form != first[1]:
            _Reader(form, pairing).read(line)  # an error of the row itself says more
            raise DataError(_differ(first[0], first[1], line, form))
        first[2].read(line)

    for _ in each_row(data_rows(str(source), setting), read):
        pass
    assert first is not None, "a file without rows is refused"
    _, found, reader = first
    rows = reader.finish()
    if not rows:
        raise DataError(
            f"{source} has no row to learn from: {'; '.join(reader.left_out())}: give another file"
        )
    return PreferenceFile(found, rows, tuple(reader.left_out()))


def rows_of(line: JsonRow, form: Form) -> list[PreferenceRow]:
    """What one line gives by itself; an answer that others are rated against stands alone.

    Raises `DataError` when it gives nothing.
    """
    reader = _Reader(form, "best_worst")
    reader.read(line)
    alone = [replace(row, answers=(scored[0].answer,)) for row, scored in reader.rated()]
    rows = alone or reader.finish()
    if not rows:
        raise DataError(f"{line.where}: {' '.join(reader.left_out())}")
    return rows


def _differ(first: JsonRow, form: Form, line: JsonRow, other: Form) -> str:
    if form.kind != other.kind:
        parts = f"of the form {EXAMPLES[form.kind]}", f"of the form {EXAMPLES[other.kind]}"
    else:
        parts = f"{form}", f"{other}"
    return (
        f"{first.where} is {parts[0]} and {line.where} {parts[1]}, expected one form throughout: "
        "split the file"
    )


def form_of(line: JsonRow, wanted: str) -> Form:
    """What a row is by its columns; raises `DataError` if it is nothing known."""
    values = {name: value for name, value in _parsed(line).values.items() if value is not None}
    names = set(values)
    pair = names & {"chosen", "rejected"}
    single = "completion" in names
    prompt = next((name for name in PROMPTS if name in names), "")

    def form(kind: Kind, name: str, *answers: object) -> Form:
        return Form(kind, name, prompt, _style((*answers, values.get(prompt))))

    if len(pair) == 2 and not single:
        texts = [values["chosen"], values["rejected"]]
        whole = prompt == "prompt" and _is_dialogue(values[prompt])
        if all(isinstance(text, str) for text in texts) and (
            whole or all(map(_is_dialogue, texts))
        ):
            return Form("pairs", "pairs of Human/Assistant dialogues", prompt, "text")
        return form("pairs", "pairs" if prompt else "pairs with an implicit prompt", *texts)
    if prompt and {"response_1", "response_2", "preference_strength"} <= names:
        return form("pairs", "compared answers", values["response_1"], values["response_2"])
    if prompt and not pair and any(isinstance(values.get(name), list | tuple) for name in LISTS):
        return form("pairs", "scored answers")
    if "label" in line.values and not pair and (single or prompt == "messages"):
        whole = prompt == "messages" and not single
        name = "labelled conversations" if whole else "labelled answers"
        return form("labels", name, values.get("completion"))
    if prompt and "response" in names and not pair and any(name in names for name in SCORES):
        return form("pairs", "rated answers", values["response"])
    if single and not pair:
        return form("completions", "completions", values["completion"])
    raise DataError(
        f"{line.where} has the fields {sorted(names)}, expected {wanted}: rename the fields or "
        "correct this line"
    )


def _parsed(line: JsonRow) -> JsonRow:
    """The row with messages where a cell, as of a CSV file, holds their JSON text."""
    return JsonRow(line.where, {name: parsed_cell(cell) for name, cell in line.values.items()})


def _style(cells: Iterable[object]) -> str:
    listed = any(isinstance(cell, list | tuple | Mapping) for cell in cells)
    return "messages" if listed else "text"


def _is_dialogue(value: object) -> bool:
    return isinstance(value, str) and value.lstrip("\n").startswith(HUMAN.lstrip("\n"))


class _Scored(NamedTuple):
    """An answer with what it was given, to be compared with others to the same prompt."""

    where: str
    answer: Answer
    score: float


class _Reader:
    """Rows of one form, read one after another."""

    def __init__(self, form: Form, pairing: Pairing) -> None:
        self._form, self._pairing = form, pairing
        self._rows: list[PreferenceRow] = []
        self._rated: dict[str, tuple[PreferenceRow, list[_Scored]]] = {}
        self._said: dict[float, str] = {}
        self._left_out: dict[str, list[str]] = {}
        self._count = 0

    def read(self, line: JsonRow) -> None:
        line = _parsed(line)
        self._count += 1
        by_form: dict[str, Callable[[JsonRow], None]] = {
            "pairs of Human/Assistant dialogues": self._dialogues,
            "compared answers": self._compared,
            "scored answers": self._scored,
            "rated answers": self._rated_answer,
            "labelled answers": self._labelled,
            "labelled conversations": self._labelled,
            "completions": self._labelled,
        }
        by_form.get(self._form.name, self._pair)(line)

    def rated(self) -> list[tuple[PreferenceRow, list[_Scored]]]:
        """Prompts whose answers are rated one row each."""
        return list(self._rated.values())

    def finish(self) -> list[PreferenceRow]:
        """All rows; the pairs of rated answers are made when all have been read."""
        for row, scored in self._rated.values():
            self._compare(row, scored)
        return self._rows

    def left_out(self) -> Iterator[str]:
        for why, places in self._left_out.items():
            yield (
                f"{len(places)} of {self._count} rows are left out, because {why}, such as "
                f"{places[0]}"
            )

    def _leave_out(self, where: str, why: str) -> None:
        self._left_out.setdefault(why, []).append(where)

    def _pair(self, line: JsonRow) -> None:
        prompt, answers = prompt_and_answers(line)
        if answers[0] == answers[1]:
            raise DataError(
                f"{line.where}: 'chosen' and 'rejected' are the same answer "
                f"{answer_text(answers[0])[:40]!r}, which says nothing about either: remove this "
                "line"
            )
        self._rows.append(
            PreferenceRow(line.where, prompt, answers, margin=margin_of(line), tools=tools_of(line))
        )

    def _dialogues(self, line: JsonRow) -> None:
        before = line.values.get("prompt") or ""
        texts = [f"{before}{line.values[name]}" for name in ("chosen", "rejected")]
        chosen, rejected = (dialogue(text, line.where) for text in texts)
        if not all(
            chat[-1].role == "assistant" and chat[-1].content for chat in (chosen, rejected)
        ):
            return self._leave_out(line.where, "an answer is empty")
        if chosen == rejected:
            return self._leave_out(line.where, "both answers are the same")
        shared = shared_turns(chosen, rejected)
        if not shared or chosen[shared].role != "assistant" or rejected[shared].role != "assistant":
            return self._leave_out(line.where, "the dialogues do not answer the same turn")
        answers = chosen[shared:], rejected[shared:]
        self._rows.append(
            PreferenceRow(line.where, chosen[:shared], answers, margin=margin_of(line))
        )

    def _compared(self, line: JsonRow) -> None:
        strength = number_of(line, "preference_strength")
        one, two = (answer_of(line.values[n], n, line.where) for n in ("response_1", "response_2"))
        scored = [_Scored(line.where, one, 0.0), _Scored(line.where, two, strength)]
        self._compare(PreferenceRow(line.where, prompt_of(line), (), tools=tools_of(line)), scored)

    def _scored(self, line: JsonRow) -> None:
        name = next(n for n in LISTS if isinstance(line.values.get(n), list | tuple))
        items = line.values[name]
        assert isinstance(items, list | tuple)
        apart = next((line.values[n] for n in ("scores", "ratings") if line.values.get(n)), None)
        scored = []
        for number, item in enumerate(items):
            where = f"{line.where}: field '{name}', answer {number}"
            score: object
            if isinstance(item, Mapping):
                said = next((item[n] for n in ANSWERS if item.get(n) is not None), None)
                score = next((item[n] for n in SCORES if item.get(n) is not None), None)
            else:
                said, score = item, None
            if isinstance(apart, list | tuple) and len(apart) == len(items):
                score = apart[number]
            value = finite(score)
            if value is None:
                raise DataError(
                    f"{where}, is {short(item)}, expected "
                    '{"response": <text>, "overall_score": <number>}: correct this line'
                )
            scored.append(_Scored(line.where, answer_of(said, name, line.where), value))
        self._compare(PreferenceRow(line.where, prompt_of(line), (), tools=tools_of(line)), scored)

    def _rated_answer(self, line: JsonRow) -> None:
        score = number_of(line, next(n for n in SCORES if line.values.get(n) is not None))
        row = PreferenceRow(line.where, prompt_of(line), (), tools=tools_of(line))
        answer = answer_of(line.values["response"], "response", line.where)
        self._rated.setdefault(row.key, (row, []))[1].append(_Scored(line.where, answer, score))

    def _compare(self, row: PreferenceRow, scored: Sequence[_Scored]) -> None:
        """Add the pairs of answers to one prompt whose scores differ."""
        ranked = sorted(scored, key=lambda one: -one.score)
        if len(ranked) < 2:
            return self._leave_out(row.where, "their prompt has one answer")
        if ranked[0].score == ranked[-1].score:
            return self._leave_out(row.where, "all answers have the same score")
        pairs = [(ranked[0], ranked[-1])]
        if self._pairing == "all":
            pairs = [(a, b) for i, a in enumerate(ranked) for b in ranked[i + 1 :]]
        for better, worse in pairs:
            if better.score != worse.score and better.answer != worse.answer:
                answers, margin = (better.answer, worse.answer), better.score - worse.score
                self._rows.append(
                    PreferenceRow(better.where, row.prompt, answers, margin, tools=row.tools)
                )

    def _labelled(self, line: JsonRow) -> None:
        if "label" in line.values and line.values["label"] is None:
            raise DataError(
                f"{line.where}: field 'label' is null, expected true or false: fill it in"
            )
        label = self._label(line) if "label" in line.values else None
        if self._form.name == "labelled conversations":
            chat = chat_of(line.values["messages"], "messages", line.where)
            last = max((i for i, m in enumerate(chat) if m.role != "assistant"), default=-1) + 1
            prompt, answer = chat[:last], chat[last:]
            if not prompt or not answer:
                raise DataError(
                    f"{line.where}: field 'messages' has the roles {[m.role for m in chat]}, "
                    "expected a question and, at the end, the assistant's answer: correct this line"
                )
            answer = checked_answer(answer, "messages", line.where)
        else:
            prompt = prompt_of(line)
            answer = answer_of(line.values["completion"], "completion", line.where)
        self._rows.append(
            PreferenceRow(line.where, prompt, (answer,), label=label, tools=tools_of(line))
        )

    def _label(self, line: JsonRow) -> bool:
        value = line.values["label"]
        if isinstance(value, bool):
            return value
        said = value.strip().lower() if isinstance(value, str) else ""
        if isinstance(value, int | float) and value in (1, 0, -1):
            said = str(int(value))
        if said not in LABELS:
            raise DataError(
                f"{line.where}: field 'label' is {value!r} ({type(value).__name__}), expected true "
                "(desirable) or false, or 1 and 0, or 1 and -1: correct this line"
            )
        if said in ("0", "-1"):
            self._said.setdefault(float(said), line.where)
            if len(self._said) == 2:
                raise DataError(
                    f"{self._said[0.0]} has the label 0 and {self._said[-1.0]} the label -1, "
                    "expected 1 and 0, or 1 and -1: 0 could mean that nobody knows; write true or "
                    "false"
                )
        return LABELS[said]


def doubtful(rows: Sequence[PreferenceRow]) -> list[str]:
    """A sentence for each kind of row that can be trained on and is probably a mistake, counted.

    Rows that occur again, rows that contradict one another, and pairs whose own scores say that the
    rejected answer is better.
    """
    first: dict[tuple[object, ...], PreferenceRow] = {}
    again: list[tuple[PreferenceRow, PreferenceRow]] = []
    against: list[tuple[PreferenceRow, PreferenceRow]] = []
    for row in rows:
        key, texts = row.key, row.texts()
        same = (key, texts, row.label)
        other = (key, texts[::-1], None if row.label is None else not row.label)
        if same in first:
            again.append((row, first[same]))
        elif other in first and (len(texts) == 2 or row.label is not None):
            against.append((row, first[other]))
        first.setdefault(same, row)
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
    worse = [row for row in rows if row.margin < 0]
    if worse:
        found.append(
            f"{len(worse)} of {len(rows)} rows give the rejected answer the higher score, such as "
            f"{worse[0].where}"
        )
    return found
