"""YAML text to plain values plus the line of every key and item. Duplicate keys are errors.

What a file may hold is bounded: its size, how deep it nests, and how many values there are once
aliases are expanded.
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from posttrain.core.errors import ConfigError
from posttrain.core.runtime.files import irregular

MAX_BYTES = 1_000_000
MAX_DEPTH = 60
MAX_VALUES = 50_000
"""Values of a file with aliases expanded: a few lines of them can stand for billions."""
MAX_DIGITS = 100
_HOME_OF = re.compile(r"~[A-Za-z_][\w.-]{0,31}/\S*")
"""A path in the home of a user who is named."""
Loc = tuple[str | int, ...]
"""The place of a value: mapping keys and list positions from the root."""


OVERRIDE = "--set "
"""What the place of a value that the command line gave begins with."""


def dotted(loc: Loc) -> str:
    """The place as a person writes it: `stages.rl.rewards.0.name`."""
    return ".".join(str(part) for part in loc)


def read_yaml(path: Path) -> tuple[dict[str, object], dict[Loc, str]]:
    """The mapping in the file at `path`, and the `file:line` of each place in it."""
    text = _text(path)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            raise ConfigError(f"{path} is empty; it needs at least 'task' and 'stages'")
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(
                f"{path}:{root.start_mark.line + 1}: the file must hold a mapping such as "
                "'task: ...', not a bare value or a list"
            )
        marks: dict[Loc, str] = {}
        for count, (loc, line) in enumerate(_walk(root, (), path, ())):
            if count >= MAX_VALUES:
                raise ConfigError(
                    f"{path}:{line}: the file has more than {MAX_VALUES} values once its aliases "
                    "are expanded; write a smaller one"
                )
            marks[loc] = f"{path}:{line}"
        value = read_value(text)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_syntax(path, error)) from error
    except yaml.YAMLError as error:  # control characters have a position but no mark
        raise ConfigError(f"{path}: this is not YAML: {' '.join(str(error).split())}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: a value cannot be read: {error}; put it in quotes") from error
    except RecursionError as error:
        raise ConfigError(f"{path} {TOO_DEEP}") from error
    return value, marks


TOO_DEEP = f"nests deeper than {MAX_DEPTH} levels; no part of a configuration does"


def _text(path: Path) -> str:
    try:
        kind = irregular(path)
        if kind:
            inside = " in it" if kind == "a folder" else ""
            raise ConfigError(f"{path} is {kind}; name a YAML file{inside}")
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except PermissionError as error:
        raise ConfigError(f"{path} may not be read by this user; change its permissions") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path} ({error.strerror}); name a YAML file") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(
            f"{path} is larger than {MAX_BYTES // 1000} kB, which no configuration needs; name a "
            "YAML file"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text ({error.reason}); save it as UTF-8") from error


def read_value(text: str) -> Any:  # Any: whatever YAML holds
    """The value of a YAML text; raises `ValueError` for one whose tag does not fit its text."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise
    # The constructors look up `!!bool maybe` in a table and take a match of `!!timestamp x`.
    except (KeyError, IndexError, AttributeError, TypeError, OverflowError) as error:
        raise ValueError("its tag (!!...) does not fit its text") from error


def check_plain(values: object, where: Callable[[Loc], str]) -> None:
    """Raise `ConfigError` for a value that is not JSON's: a date, bytes, a set, a huge number, text
    that no file can hold; and for nesting deeper than `MAX_DEPTH`."""
    waiting: list[tuple[Loc, object]] = [((), values)]
    while waiting:
        loc, value = waiting.pop()
        if len(loc) > MAX_DEPTH:
            raise ConfigError(f"{where(loc)}: {dotted(loc[:3])}... {TOO_DEEP}")
        if isinstance(value, dict):
            waiting += [((*loc, key), item) for key, item in value.items()]
            wrong = next((_odd(key) for key in value if _odd(key)), "")
        elif isinstance(value, list):
            waiting += [((*loc, index), item) for index, item in enumerate(value)]
            wrong = ""
        else:
            wrong = _odd(value)
        if wrong:
            raise ConfigError(f"{where(loc)}: {dotted(loc) or 'the file'}: {wrong}")


def _odd(value: object) -> str:
    """What is wrong with a single value; empty if nothing is."""
    if isinstance(value, str):
        if "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
            return "the text holds a NUL or half of a surrogate pair, which is not text; remove it"
        if _HOME_OF.fullmatch(value) and os.path.expanduser(value) == value:  # noqa: PTH111 - Path raises
            user = value[1:].partition("/")[0]
            return f"this machine has no user '{user}', so {value[:80]} is not a path; correct it"
    elif isinstance(value, int):
        if value.bit_length() > 4 * MAX_DIGITS:
            return f"a number of more than {MAX_DIGITS} digits; write a smaller one"
    elif value is not None and not isinstance(value, float):
        kind = "a date" if isinstance(value, datetime.date) else f"of type {type(value).__name__}"
        return (
            f"the value is {kind}, expected text, a number, a list or a mapping; put it in quotes"
        )
    return ""


def _syntax(path: Path, error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    line = f":{mark.line + 1}" if mark else ""
    hint = "indent with spaces, not tabs" if "\\t" in str(error) else "check indent, colons, quotes"
    return f"{path}{line}: this is not YAML: {error.problem or error.context}; {hint}"


def _walk(
    node: yaml.Node, loc: Loc, path: Path, above: tuple[int, ...]
) -> Iterator[tuple[Loc, int]]:
    """Every place below `node` with its 1-based line; `above` are the nodes that hold it."""
    if id(node) in above:
        raise ConfigError(
            f"{path}:{node.start_mark.line + 1}: {dotted(loc)} is an alias of a value that holds it"
        )
    inside = (*above, id(node))
    if len(inside) > MAX_DEPTH:
        raise ConfigError(f"{path}:{node.start_mark.line + 1}: the file {TOO_DEEP}")
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield (*loc, index), item.start_mark.line + 1
            yield from _walk(item, (*loc, index), path, inside)
    elif isinstance(node, yaml.MappingNode):
        first: dict[str, int] = {}
        # Keys merged in with `<<` come first, so that the mapping's own lines win.
        for key, value in sorted(node.value, key=lambda pair: not _is_merge(pair[0])):
            line = key.start_mark.line + 1
            if _is_merge(key):
                for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    yield from _walk(merged, loc, path, inside)
                continue
            if key.tag != "tag:yaml.org,2002:str":
                shown = key.value if isinstance(key, yaml.ScalarNode) else "a list or mapping"
                raise ConfigError(
                    f"{path}:{line}: key {shown} of {dotted(loc) or 'the file'} is not text; "
                    "put it in quotes"
                )
            if key.value in first:
                raise ConfigError(
                    f"{path}:{line}: {dotted((*loc, key.value))} is written twice, first in line "
                    f"{first[key.value]}; keep one of them"
                )
            first[key.value] = line
            yield (*loc, key.value), line
            yield from _walk(value, (*loc, key.value), path, inside)


def _is_merge(key: yaml.Node) -> bool:
    return key.tag == "tag:yaml.org,2002:merge"


def where(marks: Mapping[Loc, str], loc: Loc, default: str) -> str:
    """The `file:line` of `loc`, or of the nearest place above it that is written anywhere.

    With the `--set` that changed a part of it, where one did.
    """
    found = next(
        (marks[loc[:end]] for end in range(len(loc), 0, -1) if loc[:end] in marks), default
    )
    if loc and not found.startswith(OVERRIDE):
        below = (m for at, m in marks.items() if at[: len(loc)] == loc and m.startswith(OVERRIDE))
        override = next(below, None)
        return found if override is None else f"{found} with {override}"
    return found
