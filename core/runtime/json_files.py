"""JSON and JSON Lines files, and strict JSON, with errors that name file and line."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn, cast

from posttrain.core.errors import DataError
from posttrain.core.runtime.files import irregular

if TYPE_CHECKING:
    from jsonschema.protocols import Validator


@dataclass(frozen=True, slots=True)
class JsonRow:
    """One line: `where` is `file:line`, for messages; `values` are the object's fields."""

    where: str
    values: dict[str, object]


def read_json_lines(path: Path, setting: str, example: str) -> list[JsonRow]:
    """Every object of the file, blank lines left out; raises `DataError` for anything else."""
    return list(stream_json_lines(path, setting, example))


@contextlib.contextmanager
def open_data(path: Path, setting: str, what: str) -> Iterator[IO[bytes]]:
    """The bytes of a regular file, decompressed if its name ends in .gz; errors are `DataError`."""
    place = path.expanduser()
    try:
        kind = irregular(place)
        if kind:
            raise DataError(
                f"cannot read {path}, which is {kind} and not {what}: correct {setting}"
            )
        packed = place.suffix.lower() == ".gz"
        opened = cast(IO[bytes], gzip.open(place) if packed else place.open("rb"))
        with opened as stream:
            yield stream
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path} is not a whole gzip file ({error}): write or download it again"
        ) from error
    except OSError as error:
        raise DataError(
            f"cannot read {path} ({error.strerror}), expected {what}: correct "
            f"{setting}; relative paths start at {Path.cwd()}"
        ) from error


def no_rows(path: Path, example: str) -> DataError:
    return DataError(f"{path} has no rows, expected at least one such as {example}")


def stream_json_lines(path: Path, setting: str, example: str) -> Iterator[JsonRow]:
    """The same, a line in memory at a time."""
    found = False
    with open_data(path, setting, "a JSON Lines file") as stream:
        # Only "\n" ends a line: JSON strings may hold U+2028 and other line breaks of Unicode.
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
    if not found:
        raise no_rows(path, example)


ROW_KEYS = ("data", "rows", "examples")
"""Names under which a JSON file's only object may hold its rows."""


def stream_json(path: Path, setting: str, example: str) -> Iterator[JsonRow]:
    """Rows of a JSON file, a row in memory at a time; `where` counts rows from 1.

    The file is an array of objects, an object that holds one (`ROW_KEYS`), or, in spite of its
    name, JSON Lines.
    """
    number, rest = 0, ""
    with open_data(path, setting, "a JSON file") as stream:
        text = _Characters(io.TextIOWrapper(stream, encoding="utf-8-sig"))
        try:
            opening = text.next()
            wrapped = opening == "{" and text.enter_rows()
            if opening == "[" or wrapped:
                for number, element in enumerate(text.elements(), start=1):
                    yield _row(element, f"{path}:{number}", example)
                if wrapped:
                    text.skip_fields()
            rest = text.next()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path} is not UTF-8 after row {number}: save the file as UTF-8"
            ) from error
        except NotJson as error:
            raise DataError(
                f"{path} is not JSON after row {number} ({error}), expected an array of objects "
                f"such as [{example}]: correct the file"
            ) from error
    if opening == "{" and not wrapped:
        if rest:
            yield from stream_json_lines(path, setting, example)
            return
        with open_data(path, setting, "a JSON file") as stream:
            yield _row(_text(stream.read(), path, 1), f"{path}:1", example)
    elif opening not in ("", "[", "{"):
        raise DataError(
            f"{path} begins with {opening!r}, expected an array of JSON objects such as "
            f"[{example}]: correct the file"
        )
    elif rest:
        raise DataError(
            f"{path} goes on after its last row with {rest!r}, expected one array of objects: "
            "remove what follows, or name the file .jsonl if it has a JSON value a line"
        )
    elif number == 0:
        raise no_rows(path, example)


class _Characters:
    """The text of a JSON file, read as far as it is needed. Methods raise `NotJson`."""

    chunk = 1 << 16
    decoder = json.JSONDecoder()

    def __init__(self, stream: io.TextIOWrapper) -> None:
        self.stream, self.text, self.at = stream, "", 0

    def more(self) -> bool:
        """Read on, as much again as is held; False at the end of the file."""
        self.text, self.at = self.text[self.at :], 0
        if len(self.text) > MAX_LINE:
            raise NotJson(f"a value is longer than {MAX_LINE // 1_000_000} MB, or is never closed")
        read = self.stream.read(max(self.chunk, len(self.text)))
        self.text += read
        return bool(read)

    def next(self) -> str:
        """The next character that is not white space, where reading goes on; "" at the end."""
        while True:
            found = re.compile(r"\S").search(self.text, self.at)
            self.at = found.start() if found else len(self.text)
            if found:
                return found[0]
            if not self.more():
                return ""

    def take(self, allowed: str) -> str:
        """Step over the next character, which is one of `allowed`."""
        found = self.next()
        if not found or found not in allowed:
            seen = repr(found) if found else "the end of the file"
            raise NotJson(f"expected {' or '.join(map(repr, allowed))}, found {seen}")
        self.at += 1
        return found

    def value(self) -> str:
        """The text of the JSON value that comes next."""
        if not self.next():
            raise NotJson("expected a value, found the end of the file")
        while True:
            try:
                _, end = self.decoder.raw_decode(self.text, self.at)
            except RecursionError as error:
                raise NotJson("nested too deep") from error
            except json.JSONDecodeError as error:
                if not self.more():
                    raise NotJson(error.msg) from error
                continue
            size = end - self.at
            # A number may go on in what was not read yet.
            if self.text[end - 1] in '}]"' or end < len(self.text) or not self.more():
                start, self.at = self.at, self.at + size
                return self.text[start : self.at]

    def enter_rows(self) -> bool:
        """Step into the object's array of rows; False if it has none, and is a row itself."""
        self.take("{")
        while self.next() == '"':
            name = json.loads(self.value())
            self.take(":")
            if name in ROW_KEYS and self.next() == "[" and self.holds_objects():
                return True
            self.value()
            if self.take(",}") == "}":
                break
        return False

    def holds_objects(self) -> bool:
        """Whether the array that comes next is empty or begins with an object."""
        while not (found := re.compile(r"\[\s*(\S)").match(self.text, self.at)):
            if not self.more():
                return False
        return found[1] in "{]"

    def elements(self) -> Iterator[str]:
        """The texts of the array's elements."""
        self.take("[")
        if self.next() == "]":
            self.at += 1
            return
        while True:
            yield self.value()
            if self.take(",]") == "]":
                return

    def skip_fields(self) -> None:
        """Step over what follows the rows in their object."""
        while self.take(",}") == ",":
            self.value()
            self.take(":")
            self.value()


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
    import jsonschema  # with referencing it takes 0.03 s, and few configs have a schema
    import referencing

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
    from referencing.exceptions import Unresolvable

    try:
        found = next(held.iter_errors(value), None)
    except Unresolvable as error:
        raise ValueError(f"the schema refers to '{error.ref}', which is not in it") from error
    except re.error as error:
        raise ValueError(f"a pattern of the schema is not a regular expression: {error}") from error
    except RecursionError:
        return "nested too deep to be held against the schema"
    return None if found is None else f"{found.json_path}: {found.message[:200]}"
