"""JSON Lines files and strict JSON, with errors that name file, line and what was expected."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import jsonschema
import referencing
from jsonschema.protocols import Validator

from posttrain.core.errors import DataError
from posttrain.core.runtime.files import irregular


@dataclass(frozen=True, slots=True)
class JsonRow:
    """One line: `where` is `file:line`, for messages; `values` are the object's fields."""

    where: str
    values: dict[str, object]


def read_json_lines(path: Path, setting: str, example: str) -> list[JsonRow]:
    """Every object of the file, blank lines left out; raises `DataError` for anything else."""
    return list(stream_json_lines(path, setting, example))


def stream_json_lines(path: Path, setting: str, example: str) -> Iterator[JsonRow]:
    """The same, a line in memory at a time."""
    found = False
    try:
        kind = irregular(path.expanduser())
        if kind:
            raise DataError(
                f"cannot read {path}, which is {kind} and not a file of JSON Lines: correct "
                f"{setting}"
            )
        # Only "\n" ends a line: JSON strings may hold U+2028 and other line breaks of Unicode.
        with path.expanduser().open("rb") as stream:
            lines = iter(partial(stream.readline, MAX_LINE + 1), b"")
            for number, line in enumerate(lines, start=1):
                if len(line) > MAX_LINE:
                    raise DataError(
                        f"{path}:{number} is longer than {MAX_LINE // 1_000_000} MB, expected one "
                        f"JSON object a line, such as {example}: split the line"
                    )
                text = _text(line, path, number)
                if text.strip():
                    found = True
                    yield _row(text, f"{path}:{number}", example)
    except OSError as error:
        raise DataError(
            f"cannot read {path} ({error.strerror}), expected a JSON Lines file: correct "
            f"{setting}; relative paths start at {Path.cwd()}"
        ) from error
    if not found:
        raise DataError(f"{path} has no rows, expected at least one line such as {example}")


def _text(line: bytes, path: Path, number: int) -> str:
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 (line {number}, byte {error.start}): save the file as UTF-8"
        ) from error


def _row(line: str, where: str, example: str) -> JsonRow:
    try:
        value = loads(line)
        if "\\u" in line:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} holds \\u{ord(error.object[error.start]):04x}, half of a surrogate pair, "
            "expected text: remove it or write the whole pair"
        ) from error
    except NotJson as error:
        raise DataError(f"{where} is not JSON ({error}): correct this line") from error
    if not isinstance(value, dict):
        raise DataError(
            f"{where} holds {line.strip()[:40]!r}, expected a JSON object such as {example}"
        )
    return JsonRow(where, value)


MAX_DEPTH = 200
MAX_LINE = 100_000_000
"""Bytes of a line; a file without line ends would otherwise be read as one."""


class NotJson(Exception):
    """The text is not JSON; the message says why."""


def loads(text: str) -> Any:  # Any: a JSON value
    """The JSON value that is the whole of `text`; raises `NotJson`.

    Refused in addition to what Python refuses: NaN and Infinity, numbers beyond a float's range, a
    key that stands twice, and nesting deeper than 200.
    """
    try:
        value = json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            object_pairs_hook=_no_twins,
        )
    except (ValueError, RecursionError) as error:
        raise NotJson(str(error) or "nested too deep") from error
    nested = text.count("[") + text.count("{") > MAX_DEPTH
    if nested and _deeper_than(value, MAX_DEPTH):
        raise NotJson(f"nested deeper than {MAX_DEPTH}")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"{digits[:20]} is beyond the range of numbers")
    return value


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:  # Any: JSON values
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:40]!r} is written twice in an object")
    return made


def _deeper_than(value: Any, limit: int) -> bool:  # Any: a JSON value
    level, depth = [value], 0
    while level and depth <= limit:
        level = [
            child
            for item in level
            if isinstance(item, (dict, list))
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        depth += 1
    return bool(level)


def validator(schema: Mapping[str, Any] | bool) -> Validator:  # Any: a JSON schema
    """A validator of `schema`, which may refer only to itself; `ValueError` if it is wrong."""
    if not isinstance(schema, (Mapping, bool)):
        raise ValueError("not a JSON schema: it is not an object")
    cls = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        cls.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(f"not a JSON schema: {error.message}") from error
    # An empty registry: without it a $ref to a URL would be fetched.
    made: Validator = cls(schema, registry=referencing.Registry())
    return made


def complaint(held: Validator, value: Any) -> str | None:  # Any: a JSON value
    """The first thing that `value` breaks, with its place; None if it fits.

    `ValueError` says that the schema itself cannot be used: a reference that leads nowhere, or a
    pattern that is not a regular expression.
    """
    try:
        found = next(held.iter_errors(value), None)
    except referencing.exceptions.Unresolvable as error:
        raise ValueError(f"the schema refers to '{error.ref}', which is not in it") from error
    except re.error as error:
        raise ValueError(f"a pattern of the schema is not a regular expression: {error}") from error
    except RecursionError:
        return "nested too deep to be held against the schema"
    return None if found is None else f"{found.json_path}: {found.message[:200]}"
