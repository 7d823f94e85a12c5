"""YAML text to plain values plus the line of every key and item. Duplicate keys are errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from posttrain.core.errors import ConfigError

Loc = tuple[str | int, ...]
"""The place of a value: mapping keys and list positions from the root."""


def dotted(loc: Loc) -> str:
    """The place as a person writes it: `stages.rl.rewards.0.name`."""
    return ".".join(str(part) for part in loc)


def read_yaml(path: Path) -> tuple[dict[str, object], dict[Loc, str]]:
    """The mapping in the file at `path`, and the `file:line` of each place in it."""
    try:
        text = path.read_text(encoding="utf-8")
    except IsADirectoryError as error:
        raise ConfigError(f"{path} is a folder; name a YAML file in it") from error
    except PermissionError as error:
        raise ConfigError(f"{path} may not be read by this user; change its permissions") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text ({error.reason}); save it as UTF-8") from error
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
        for loc, line in _walk(root, (), path, ()):
            marks[loc] = f"{path}:{line}"
        value = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_syntax(path, error)) from error
    except yaml.YAMLError as error:  # control characters have a position but no mark
        raise ConfigError(f"{path}: this is not YAML: {' '.join(str(error).split())}") from error
    except ValueError as error:  # a date such as 2024-13-45 is read and refused by the constructor
        raise ConfigError(f"{path}: a value cannot be read: {error}; put it in quotes") from error
    return value, marks


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
    """The `file:line` of `loc`, or of the nearest place above it that is written anywhere."""
    for end in range(len(loc), 0, -1):
        if loc[:end] in marks:
            return marks[loc[:end]]
    return default
