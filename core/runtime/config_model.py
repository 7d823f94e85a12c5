"""The base of every model of configuration: unknown keys and meaningless numbers are errors."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

LARGEST = 1_000_000_000
"""Bound on the size of a number whose field declares no bound of its own on that side."""


class ConfigModel(BaseModel):
    """Base of sections, of plugin configs and of their parts. Values are frozen.

    Refused for every field: keys that do not exist, NaN and infinity, true and false where a number
    is expected, and numbers beyond `LARGEST` in size unless the field's own bound allows them.
    A single value stands for a list of one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        schema = handler(source)
        # Any: a core schema is a tree of dictionaries with a form for each of fifty types.
        node: Any = handler.resolve_ref_schema(schema)
        while node["type"] != "model-fields":
            node = node["schema"]
        for field in node["fields"].values():
            field["schema"] = _strict(field["schema"])
        return schema


def _strict(node: Any) -> Any:
    """The schema of a value with its numbers bounded; nested models have been through this."""
    kind = node["type"]
    if kind in ("int", "float"):
        return _no_boolean(_bounded(node))
    if kind == "literal" and any(type(value) is int for value in node["expected"]):
        return _no_boolean(node)
    if kind in ("model", "definition-ref", "definitions"):
        return node
    if kind == "union":
        choices = node["choices"]
        if not any(choice["type"] == "bool" for choice in choices if isinstance(choice, dict)):
            node["choices"] = [_strict(choice) for choice in choices]
    elif kind == "tagged-union":
        node["choices"] = {tag: _strict(choice) for tag, choice in node["choices"].items()}
    elif kind == "tuple":
        node["items_schema"] = [_strict(item) for item in node["items_schema"]]
        if "variadic_item_index" in node:
            return core_schema.no_info_before_validator_function(_list_of_one, node)
    elif kind == "dict" and "values_schema" in node:
        node["values_schema"] = _strict(node["values_schema"])
    else:
        for inner in ("schema", "items_schema"):  # defaults, null, validators; lists and sets
            if isinstance(node.get(inner), dict):
                node[inner] = _strict(node[inner])
    return node


def _bounded(node: Any) -> Any:
    own = {} if {"le", "lt"} & node.keys() else {"le": LARGEST}
    if not {"ge", "gt"} & node.keys():
        own["ge"] = -LARGEST
    return {**node, **own}


def _no_boolean(node: Any) -> CoreSchema:
    return core_schema.no_info_before_validator_function(_refuse_boolean, node)


def _list_of_one(value: Any) -> Any:
    """`rewards: accuracy` stands for `rewards: [accuracy]`."""
    return [value] if isinstance(value, str | dict | int | float) else value


def _refuse_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value
