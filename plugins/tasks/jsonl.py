"""Your own problems from a JSON Lines file: one object per line with a prompt and an answer.

Longer than other plugins because most of it says exactly what is wrong with which line of a file.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Literal

from pydantic import Field

from posttrain.core.artifacts import combine_digests, file_digest
from posttrain.core.contracts import PluginConfig, Task
from posttrain.core.data.json_lines import JsonRow, read_json_lines
from posttrain.core.errors import DataError
from posttrain.core.hooks import hookimpl
from posttrain.core.math.answers import is_number, numbers_in, same_number
from posttrain.core.math.splits import split_of, text_key, too_few
from posttrain.core.types import Problem, Split, Verdict


class JsonlConfig(PluginConfig):
    """Settings of `jsonl`. Paths are relative to the working directory."""

    path: Path = Field(description="JSON Lines file, UTF-8, one object per line")
    held_out_path: Path | None = Field(
        default=None, description="the held-out problems; null = part of `path`, by content"
    )
    prompt_field: str = Field(default="prompt", min_length=1, description="the question's field")
    answer_field: str = Field(default="answer", min_length=1, description="text or a number")
    worked_field: str | None = Field(
        default=None, description="what supervised fine-tuning imitates; null = the answer"
    )
    match: Literal["exact", "last_number", "contains"] = Field(
        default="last_number",
        description="exact: the whole response; last_number: its last number, by value; "
        "contains: the answer occurs in it",
    )
    held_out_permille: int = Field(
        default=100, ge=1, le=999, description="of 1000 problems, unless held_out_path is set"
    )


class JsonlTask(Task[JsonlConfig]):
    """Problems of a file. Formula: key = the prompt without extra white space.

    Held out are the problems of `held_out_path`, or without one those with sha256(key) mod 1000 <
    held_out_permille. A row that occurs twice counts once; one prompt with two answers, or one that
    is in both files, is a `DataError`. Files are read, and checked whole, when the task is built.
    Source: own; the format is that of https://jsonlines.org.
    """

    name = "jsonl"
    Config = JsonlConfig

    def __init__(self, config: JsonlConfig) -> None:
        super().__init__(config)
        rows = self._read(config.path, "task.path")
        self._splits: dict[Split, list[Problem]] = {"train": [], "held_out": []}
        if config.held_out_path is None:
            for key, (problem, _) in rows.items():
                self._splits[split_of(key, config.held_out_permille)].append(problem)
            return
        held_out = self._read(config.held_out_path, "task.held_out_path")
        for key in [key for key in rows if key in held_out]:
            raise DataError(
                f"{rows[key][1]} and {held_out[key][1]} hold the same prompt "
                f"{rows[key][0].prompt[:60]!r}, expected no overlap: remove it from one file"
            )
        self._splits["train"] = [problem for problem, _ in rows.values()]
        self._splits["held_out"] = [problem for problem, _ in held_out.values()]

    def _read(self, path: Path, setting: str) -> dict[str, tuple[Problem, str]]:
        """Problems of a file by key, each with its `file:line`."""
        prompt, answer = self.config.prompt_field, self.config.answer_field
        rows: dict[str, tuple[Problem, str]] = {}
        for row in read_json_lines(path, setting, f'{{"{prompt}": ..., "{answer}": ...}}'):
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
        prompt = self._text(row.values, self.config.prompt_field, where, numbers=False)
        answer = self._text(row.values, self.config.answer_field, where, numbers=True)
        worked = answer
        if self.config.worked_field is not None:
            worked = self._text(row.values, self.config.worked_field, where, numbers=True)
        if self.config.match == "last_number" and not is_number(answer):
            raise DataError(
                f"{where}: field '{self.config.answer_field}' is {answer[:60]!r}, expected a "
                "number because the task matches the last number: correct it, or set match: exact"
            )
        return Problem(text_key(prompt), prompt, answer, worked, {"source": where})

    def _text(self, row: dict[str, object], field: str, where: str, *, numbers: bool) -> str:
        if field not in row:
            raise DataError(
                f"{where} has no field '{field}', only {sorted(row)}: add it, or name another "
                "field in the task's settings"
            )
        value = row[field]
        # bool is an int in Python, but "True" is no answer anyone wrote.
        if numbers and isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str) or not value.strip():
            allowed = "non-empty text or a number" if numbers else "non-empty text"
            raise DataError(
                f"{where}: field '{field}' is {value!r} ({type(value).__name__}), expected "
                f"{allowed}: correct this line"
            )
        return value.strip()

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        """`count` distinct rows of `split` in an order decided by `seed`."""
        rows = list(self._splits[split])
        if len(rows) < count:
            mend = "ask for fewer, add rows, or change held_out_path or held_out_permille"
            raise too_few(self.name, split, count, len(rows), mend)
        random.Random(f"jsonl|{split}|{seed}").shuffle(rows)
        return rows[:count]

    def available(self, split: Split) -> int | None:
        """How many rows the split has."""
        return len(self._splits[split])

    def fingerprint(self) -> str:
        """Digest of the files, so that edited data are new data."""
        paths = [self.config.path, self.config.held_out_path]
        found = {str(i): file_digest(p.expanduser()) for i, p in enumerate(paths) if p}
        return combine_digests(found)

    def verify(self, problem: Problem, text: str) -> Verdict:
        """Compare as `match` says."""
        stripped = text.strip()
        if self.config.match == "exact":
            return Verdict(float(stripped == problem.answer), stripped or None)
        if self.config.match == "contains":
            found = problem.answer in text
            return Verdict(float(found), problem.answer if found else None)
        numbers = numbers_in(text)
        if not numbers:
            return Verdict(0.0, None)
        return Verdict(float(same_number(numbers[-1], problem.answer)), numbers[-1])


@hookimpl
def posttrain_register() -> list[type[JsonlTask]]:
    """Offer this plugin."""
    return [JsonlTask]
