"""Tasks whose problems are rows with a prompt and an answer, their order and their digest."""

from __future__ import annotations

import hashlib
import json
import math
import random
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from pydantic import Field

from posttrain.core.contracts import PluginConfig, Task
from posttrain.core.errors import DataError
from posttrain.core.math.answers import is_number, last_number, same_number
from posttrain.core.math.splits import split_of, text_key, too_few
from posttrain.core.runtime.json_files import JsonRow, read_json_lines
from posttrain.core.runtime.seeding import derive_seed, generator
from posttrain.core.store.artifacts import combine_digests, file_digest
from posttrain.core.types import Problem, Split, Verdict


def training_problems(task: Task[Any], count: int, seed: int, purpose: str) -> list[Problem]:
    """`count` training problems for `purpose`; a finite task is gone through again, reshuffled."""
    available = task.available("train")
    distinct = count if available is None else min(count, available)
    if distinct == 0:
        raise DataError(f"task '{task.name}' has no training problems: the data set is empty")
    pool = task.problems("train", distinct, derive_seed(seed, "problems", purpose))
    return repeat_problems(pool, count, seed, purpose)


def held_out_problems(task: Task[Any], count: int, seed: int) -> list[Problem]:
    """The held-out problems of every evaluation of a run; all there are, if fewer than `count`."""
    available = task.available("held_out")
    wanted = count if available is None else min(count, available)
    if wanted == 0:
        raise DataError(
            f"task '{task.name}' has no held-out problems: give it a held_out_path, or raise its "
            "held_out_permille"
        )
    return task.problems("held_out", wanted, derive_seed(seed, "problems", "held_out"))


def check_worked(task: Task[Any], problems: Sequence[Problem]) -> None:
    """Raise `DataError` if a problem has no worked answer to imitate."""
    missing = [problem for problem in problems if not problem.worked]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(problems)} training problems of task '{task.name}' have no "
            f"worked answer to imitate, such as {missing[0].prompt[:60]!r}: leave supervised "
            "learning out of the run, or choose other data"
        )


def problems_digest(problems: Sequence[Problem]) -> str:
    rows = [[p.key, p.prompt, p.answer, p.worked] for p in problems]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def check_disjoint(train: Sequence[Problem], held_out: Sequence[Problem]) -> None:
    """Raise `DataError` if a training problem is also held out: the task broke its contract."""
    shared = {p.key for p in train} & {p.key for p in held_out}
    if shared:
        raise DataError(
            f"{len(shared)} problem(s) are in both splits, for example {sorted(shared)[0]!r}: "
            "the task must keep train and held_out disjoint"
        )


def read_problems(path: Path) -> list[Problem]:
    """Problems of a data set that a stage made: JSON Lines with the fields of a `Problem`."""
    problems = []
    for row in read_json_lines(path, "inputs.dataset", '{"key": ..., "prompt": ...}'):
        values = row.values
        metadata = values.get("metadata")
        texts = {name: values.get(name) for name in ("key", "prompt", "answer", "worked")}
        plain = {name: text for name, text in texts.items() if isinstance(text, str)}
        if not isinstance(metadata, dict) or plain.keys() != texts.keys():
            raise DataError(f"{row.where} is not a problem: run the stage that made it again")
        reported = {str(name): str(value) for name, value in metadata.items()}
        key, prompt, answer, worked = plain.values()
        problems.append(Problem(key, prompt, answer, worked, reported))
    return problems


def repeat_problems(pool: Sequence[Problem], count: int, seed: int, purpose: str) -> list[Problem]:
    """`count` problems of `pool`, in order, then again and again in other orders."""
    chosen = list(pool)
    for epoch in range(1, -(-count // len(pool))):
        order = torch.randperm(len(pool), generator=generator(seed, "epoch", purpose, epoch))
        chosen += [pool[i] for i in order.tolist()]
    return chosen[:count]


EXAMPLE = '{"prompt": "2 + 2 =", "completion": "4"}'


def read_examples(path: str, setting: str) -> list[Problem]:
    """Every line of the file as a problem whose worked answer is its `completion`."""
    file = Path(path)
    examples = []
    for row in read_json_lines(file, setting, EXAMPLE):
        prompt, completion = row.values.get("prompt"), row.values.get("completion")
        if not isinstance(prompt, str) or not isinstance(completion, str) or not prompt:
            raise DataError(
                f"{row.where} needs the texts 'prompt' and 'completion', such as {EXAMPLE}; it has "
                f"{sorted(row.values)}: correct this line"
            )
        examples.append(Problem(row.where, prompt, completion, completion))
    return examples


Match = Literal["exact", "last_number", "contains"]


class RowConfig(PluginConfig):
    """Which fields of a row are what, how answers are compared, what is held out."""

    prompt_field: str = Field(default="prompt", min_length=1, description="the question's field")
    answer_field: str = Field(default="answer", min_length=1, description="text or a number")
    worked_field: str | None = Field(
        default=None, description="what supervised fine-tuning imitates; null = the answer"
    )
    match: Match = Field(
        default="last_number",
        description="exact: the whole response; last_number: its last number, by value; "
        "contains: the answer occurs in it",
    )
    held_out_permille: int = Field(
        default=100,
        ge=1,
        le=999,
        description="of 1000 problems, unless the held-out ones are given apart",
    )

    def fields(self) -> tuple[str, ...]:
        named = (self.prompt_field, self.answer_field, self.worked_field)
        return tuple(dict.fromkeys(name for name in named if name is not None))


RowConfigT = TypeVar("RowConfigT", bound=RowConfig)
Found = dict[str, tuple[Problem, str]]
"""Problems by key, each with where its row is."""


class RowTask(Task[RowConfigT]):
    """Problems of rows. Formula: key = the prompt, in Unicode's NFC.

    Held out are the rows given apart, or without them those with sha256(key) mod 1000 <
    held_out_permille. A row that occurs twice counts once; one prompt with two answers, or one that
    is on both sides, is a `DataError`. All rows are read, and checked, when the task is built; what
    stays in memory are the problems.
    """

    def __init__(self, config: RowConfigT) -> None:
        super().__init__(config)
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

    def _read(self, given: Iterable[JsonRow]) -> Found:
        rows: Found = {}
        for row in given:
            problem = self._problem(row)
            known = rows.setdefault(problem.key, (problem, row.where))
            if known[0].answer != problem.answer:
                raise DataError(
                    f"{known[1]} and {row.where} give one prompt the answers {known[0].answer!r} "
                    f"and {problem.answer!r}, expected one answer: remove one of the lines"
                )
        return rows

    def _problem(self, row: JsonRow) -> Problem:
        where = row.where
        prompt = _text(row.values, self.config.prompt_field, where, numbers=False)
        answer = _text(row.values, self.config.answer_field, where, numbers=True)
        worked = answer
        if self.config.worked_field is not None:
            worked = _text(row.values, self.config.worked_field, where, numbers=True)
        if self.config.match == "last_number" and not is_number(answer):
            raise DataError(
                f"{where}: field '{self.config.answer_field}' is {answer[:60]!r}, expected a "
                "number because the task matches the last number: correct it, or set match: exact"
            )
        return Problem(text_key(prompt), prompt, answer, worked, {"source": where})

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
        # White space around an answer is not compared.
        stripped, answer = text.strip(), problem.answer.strip()
        match = problem.metadata.get("match", self.config.match)
        if match == "exact":
            return Verdict(float(stripped == answer), stripped or None)
        if match == "contains":
            found = answer in text
            return Verdict(float(found), answer if found else None)
        number = last_number(text)
        right = number is not None and same_number(number, answer)
        return Verdict(float(right), number)


def _text(row: dict[str, object], field: str, where: str, *, numbers: bool) -> str:
    if field not in row:
        raise DataError(
            f"{where} has no field '{field}', only {sorted(row)}: add it, or name another "
            "field in the task's settings"
        )
    value = row[field]
    # bool is an int in Python, but "True" is not an answer anyone wrote.
    number = isinstance(value, int | float | Decimal) and not isinstance(value, bool)
    if numbers and number and (isinstance(value, int) or math.isfinite(value)):  # type: ignore[arg-type]
        return str(value)
    if not isinstance(value, str) or not value.strip():
        allowed = "non-empty text or a number" if numbers else "non-empty text"
        raise DataError(
            f"{where}: field '{field}' is {repr(value)[:80]} ({type(value).__name__}), expected "
            f"{allowed}: correct this line"
        )
    return value
