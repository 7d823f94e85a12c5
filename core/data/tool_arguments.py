"""Arguments that a model writes as text without quotes, read by the schemas of the tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.core.runtime.json_files import NotJson, loads
from posttrain.core.types import ToolSchema

NAMES = {
    **{name: "string" for name in ("string", "str", "text")},
    **{name: "integer" for name in ("integer", "int")},
    **{name: "number" for name in ("number", "float", "double")},
    **{name: "boolean" for name in ("boolean", "bool")},
    **{name: "object" for name in ("object", "dict")},
    **{name: "array" for name in ("array", "list", "tuple")},
    "null": "null",
}
"""JSON types by the names that schemas of data sets have for them."""
LITERALS = {"True": True, "False": False, "None": None}
"""What templates write that take Python's text of a value, as that of Qwen3-Coder."""
DEEPEST = 16
"""Schemas within schemas and references, at most."""


class ArgumentSchemas:
    """The schemas of the arguments of tools, by which a text becomes a value."""

    def __init__(self, tools: Sequence[ToolSchema]) -> None:
        self._parameters: dict[str, Mapping[str, Any]] = {}  # Any: JSON schemas
        for tool in tools:
            function = tool.get("function", tool)
            parameters = function.get("parameters") if isinstance(function, Mapping) else None
            if isinstance(parameters, Mapping):
                self._parameters[str(function.get("name"))] = parameters

    def value(self, tool: str, name: str, text: str) -> Any:  # Any: a JSON value
        """What `text` is as the argument `name` of `tool`.

        A string is the text as it is. Other types are JSON; where a schema takes both, a text that
        is JSON of another type of the schema is that value. Without a schema any JSON but a string
        is its value. What does not fit the schema is read as without one.
        """
        root = self._parameters.get(tool, {})
        properties = root.get("properties")
        schema = root.get("additionalProperties")
        if isinstance(properties, Mapping) and name in properties:
            schema = properties[name]
        types = _types(schema, root)
        if types is None:
            return _guessed(text)
        if types == {"string"}:
            return text
        value = None if text.strip() == "null" else json_value(text)
        is_json = value is not None or text.strip() == "null"
        if is_json and not isinstance(value, str) and _type(value) in types:
            return text if _is_member(text, schema, but_not=value) else value
        if "string" in types:
            return text
        literal = text.strip()
        if literal in LITERALS and _type(LITERALS[literal]) in types:
            return LITERALS[literal]
        return _guessed(text)


def json_value(text: str) -> Any:  # Any: a JSON value, None if it is not one that can be kept
    """A strict JSON value; half of a surrogate pair, which no text can hold, is refused."""
    try:
        value = loads(text)
        json.dumps(value, ensure_ascii=False).encode()
    except (NotJson, UnicodeEncodeError):
        return None
    return value


def _guessed(text: str) -> Any:  # Any: a JSON value
    """A value of a type that is not known."""
    if text == "null":
        return None
    value = json_value(text)
    return text if value is None or isinstance(value, str) else value


def _type(value: object) -> str:
    """The JSON type of a value."""
    kinds: tuple[tuple[type, str], ...] = (
        (bool, "boolean"),
        (int, "integer"),
        (float, "number"),
        (str, "string"),
        (list, "array"),
        (Mapping, "object"),
    )
    return next((name for kind, name in kinds if isinstance(value, kind)), "null")


def _members(schema: Mapping[str, Any]) -> list[Any] | None:  # Any: JSON
    """The values that a schema lists; None if it lists none."""
    if "const" in schema:
        return [schema["const"]]
    listed = schema.get("enum")
    return list(listed) if isinstance(listed, list | tuple) and listed else None


def _is_member(text: str, schema: Any, *, but_not: object) -> bool:  # Any: a JSON schema
    """Whether the schema lists `text`, and not the value that it is as JSON."""
    listed = (_members(schema) if isinstance(schema, Mapping) else None) or []
    same = [each for each in listed if _type(each) == _type(but_not) and each == but_not]
    return text in [each for each in listed if isinstance(each, str)] and not same


def _types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str] | None:
    """The JSON types that a schema takes; None if it takes any or does not say. Any: JSON."""
    if not isinstance(schema, Mapping) or depth > DEEPEST:
        return None
    deeper = depth + 1
    parts = [_named(schema.get("type"))]
    if (listed := _members(schema)) is not None:
        parts.append(_wide({_type(value) for value in listed}))
    if isinstance(path := schema.get("$ref"), str):
        parts.append(_types(_referred(path, root), root, deeper))
    for word in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(word), list | tuple) and options:
            taken = [_types(option, root, deeper) for option in options]
            known = [types for types in taken if types is not None]
            parts.append(frozenset().union(*known) if len(known) == len(taken) else None)
    if isinstance(every := schema.get("allOf"), list | tuple):
        parts += [_types(each, root, deeper) for each in every]
    said = [part for part in parts if part is not None]
    found = frozenset.intersection(*said) if said else frozenset()
    if found and schema.get("nullable") is True:
        found |= {"null"}
    return found or None


def _named(given: object) -> frozenset[str] | None:
    """The types of the field `type`."""
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list | tuple) or not names:
        return None
    known = {NAMES.get(name.strip().lower()) if isinstance(name, str) else None for name in names}
    return None if None in known else _wide({name for name in known if name is not None})


def _wide(types: set[str]) -> frozenset[str]:
    """With integers where numbers are taken."""
    return frozenset(types | {"integer"} if "number" in types else types)


def _referred(path: str, root: Mapping[str, Any]) -> Any:  # Any: JSON
    """The schema at a reference `#/a/b` in the tool's parameters; None if it does not exist."""
    found: Any = root
    for part in path.removeprefix("#").strip("/").split("/"):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found if path.startswith("#/") else None
