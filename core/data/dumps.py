"""Rollout dumps of other trainers as rows: verl's JSONL files and TRL's tables of completions.

verl writes a file a step (`trainer.rollout_data_dir`, `trainer.validation_data_dir`: `12.jsonl`)
with input, output, gts, score, step and what the reward function returned besides. TRL
(`log_completions`) writes `completions/completions_00012.parquet` with step, prompt, completion, a
column for each reward function, columns that the user logged, and advantage.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from posttrain.core.data.messages import chat_text, messages_from_json
from posttrain.core.data.tables import parquet_rows
from posttrain.core.errors import DataError
from posttrain.core.runtime.json_files import JsonRow, open_data
from posttrain.core.types import Message

Format = Literal["verl", "trl"]
FIELDS: dict[Format, tuple[str, ...]] = {
    "verl": ("input", "output", "score"),
    "trl": ("prompt", "completion"),
}
_WRITES = {
    "verl": "input, output, gts, score, step",
    "trl": "step, prompt, completion, a column for each reward, advantage",
}
_TAKEN = {"input", "output", "gts", "step", "prompt", "completion", "advantage", "request_id"}
_TAKEN |= {"uid", "index", "data_source", "answer", "solution", "ground_truth"}
_VERDICTS = ("acc", "accuracy", "correct", "is_correct")
_ANSWERS: dict[Format, tuple[str, ...]] = {
    "verl": ("gts",),
    "trl": ("answer", "solution", "ground_truth"),  # where a reward function logged it
}
SCORE = "score"
MOST_STEPS = 10**9


@dataclass(frozen=True, slots=True)
class DumpRow:
    """One response. Rewards are by name, None where the dump has NaN or nothing.

    `messages` are the prompt's, where the dump has them and not its text. `verdict` is what a
    column such as `acc` says.
    """

    where: str
    step: int
    prompt: str
    messages: tuple[Message, ...]
    response: str
    answer: str | None
    rewards: Mapping[str, float | None]
    total: float | None
    advantage: float | None = None
    verdict: float | None = None


@dataclass
class Dump:
    """The rows of a dump by step; `counts` are what was odd, by a sentence's end."""

    format: Format
    steps: dict[int, list[DumpRow]] = field(default_factory=dict)
    reward_names: tuple[str, ...] = ()
    counts: Counter[str] = field(default_factory=Counter)
    files: list[Path] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(map(len, self.steps.values()))

    def notes(self) -> list[str]:
        """A sentence for each thing that was odd."""
        return [f"{count} {what}" for what, count in self.counts.items()]


def read_dump(path: Path, weights: Mapping[str, float] | None = None) -> Dump:
    """The dump in a file or folder; `weights` are TRL's `reward_weights` by column, 1 if absent.

    Raises `DataError` for anything but a dump of these trainers.
    """
    files = _files(path)
    format: Format = "trl" if files[0].suffix == ".parquet" else "verl"
    dump = Dump(format, files=files)
    names: dict[str, None] = {}
    weights = weights or {}
    for file in files:
        rows = list(_rows(file, format))
        columns = _reward_columns(rows, format)
        names |= dict.fromkeys(columns)
        for row in rows:
            found = _dump_row(row, file, format, columns, weights, dump.counts)
            dump.steps.setdefault(found.step, []).append(found)
    unknown = sorted(set(weights) - set(names))
    if unknown:
        raise DataError(
            f"--weight {unknown[0]}: the dump has no reward '{unknown[0]}', only {list(names)}"
        )
    dump.reward_names = tuple(names)
    dump.steps = dict(sorted(dump.steps.items()))
    return dump


def _files(path: Path) -> list[Path]:
    """The file, or those of a folder, all of one format."""
    place = path.expanduser()
    if place.is_file():
        if place.suffix not in (".jsonl", ".parquet"):
            raise DataError(
                f"{path} ends in '{place.suffix}', expected a .jsonl file of verl or a .parquet "
                "file of TRL"
            )
        return [place]
    if not place.is_dir():
        raise DataError(
            f"there is no file or folder '{path}': give verl's trainer.rollout_data_dir, or the "
            "folder completions/ in TRL's output_dir"
        )
    inner = place / "completions"
    folder = inner if inner.is_dir() and not list(place.glob("*.parquet")) else place
    lines = sorted(folder.glob("*.jsonl"), key=lambda file: (_number(file), file.name))
    tables = sorted(folder.glob("*.parquet"))
    if lines and tables:
        raise DataError(
            f"{folder} has .jsonl and .parquet files: name one file, or a folder of one kind"
        )
    if not (lines or tables):
        raise DataError(
            f"{folder} has no dump: expected verl's 1.jsonl, 2.jsonl, ... or TRL's "
            "completions_00001.parquet, ..."
        )
    return lines or tables


def _number(file: Path) -> int:
    """The step in a file's name; -1 without one."""
    digits = file.stem.rpartition("_")[2]
    return int(digits) if digits.isdecimal() else -1


def _rows(file: Path, format: Format) -> Iterator[JsonRow]:
    if format == "trl":
        yield from parquet_rows(file, None, "the dump")
        return
    number, seen = 0, False
    with open_data(file, "the dump", "JSON Lines") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                seen = True
                yield JsonRow(f"{file}:{number}", _object(line, f"{file}:{number}"))
    if not seen:
        raise DataError(f"{file} has no rows: leave it out, or dump the step again")


def _object(line: bytes, where: str) -> dict[str, Any]:  # Any: JSON
    """A line; NaN is a number here, since Python's json writes it."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where} is not JSON ({error}): the file was cut, or verl did not write it; leave it "
            "out"
        ) from error
    if not isinstance(found, dict):
        raise DataError(f"{where} is not an object, expected {_WRITES['verl']}")
    return found


def _reward_columns(rows: Sequence[JsonRow], format: Format) -> list[str]:
    """Columns of numbers that are not known to be something else; verl's score goes first."""
    names = dict.fromkeys(name for row in rows for name in row.values)
    found = []
    for name in names:
        values = [row.values.get(name) for row in rows]
        numbers = [v for v in values if v is not None]
        if name not in _TAKEN and all(isinstance(v, int | float) for v in numbers):
            found.append(name)
    if format == "verl":
        extra = [n for n in found if n not in (SCORE, "reward")]  # validation repeats it
        return [SCORE, *extra]
    return found


def _dump_row(
    row: JsonRow,
    file: Path,
    format: Format,
    columns: Sequence[str],
    weights: Mapping[str, float],
    counts: Counter[str],
) -> DumpRow:
    values, where = row.values, row.where
    missing = [name for name in FIELDS[format] if name not in values]
    if missing:
        raise DataError(
            f"{where} has no field '{missing[0]}', only {sorted(values)}: a dump of {format} has "
            f"{_WRITES[format]}"
        )
    source, target = FIELDS[format][:2]
    prompt, messages = _prompt(values[source], f"{where}: {source}")
    rewards = {name: _number_of(values.get(name), f"{where}: {name}") for name in columns}
    if format == "verl":
        total = rewards[SCORE]
    else:
        known = [weights.get(n, 1.0) * v for n, v in rewards.items() if v is not None]
        total = sum(known) if known else None
    if total is None:
        counts["responses without a score (NaN or null), which are unscored"] += 1
    verdicts = [rewards[name] for name in _VERDICTS if rewards.get(name) is not None]
    gts = next((values[name] for name in _ANSWERS[format] if values.get(name) is not None), None)
    return DumpRow(
        where,
        _step(values.get("step"), file, where, counts),
        prompt,
        messages,
        _response(values[target], f"{where}: {target}"),
        None if gts is None else gts if isinstance(gts, str) else json.dumps(gts),
        rewards,
        total,
        _number_of(values.get("advantage"), f"{where}: advantage"),
        verdicts[0] if verdicts else None,
    )


def _step(value: object, file: Path, where: str, counts: Counter[str]) -> int:
    """The row's step; without one, that in the file's name."""
    named = _number(file)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        if named < 0:
            raise DataError(f"{where} has no step, and the file's name has none: name it 1.jsonl")
        counts["responses without a field 'step', which have that of their file's name"] += 1
        return named
    if isinstance(value, float) and value.is_integer():  # no infinity is
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise DataError(f"{where}: step is {value!r}, expected a whole number")
    if not 0 <= value <= MOST_STEPS:
        raise DataError(f"{where}: step is {value}, expected 0 or more, up to {MOST_STEPS}")
    if named >= 0 and value != named:
        counts["responses whose step is not that of their file's name; the field is taken"] += 1
    return value


def _prompt(value: object, where: str) -> tuple[str, tuple[Message, ...]]:
    if isinstance(value, str):
        return value, ()
    messages = messages_from_json(value, where)
    return chat_text(messages), messages


def _response(value: object, where: str) -> str:
    """Text, or the contents of the messages of a conversational completion."""
    if isinstance(value, str):
        return value
    return "\n".join(m.content for m in messages_from_json(value, where))


def _number_of(value: object, where: str) -> float | None:
    """A number or a truth value; None for NaN, null and infinities."""
    if value is None:
        return None
    if not isinstance(value, int | float):
        raise DataError(f"{where} is {value!r}, expected a number")
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        raise DataError(f"{where} is a number of {len(str(value))} digits, too large") from None
