"""The fields of a config model as `plugins show` and `show` print them."""

from __future__ import annotations

import inspect
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from posttrain.core.config.base import Component
from posttrain.core.config.json_schema import plugin_kind
from posttrain.core.config.preference_stages import PreferenceComponent
from posttrain.core.config.rl_stage import LossTermComponent, RewardComponent
from posttrain.core.config.sections import EnvironmentComponent

BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
COMPONENTS: dict[str, type[Component]] = {
    "environment": EnvironmentComponent,
    "policy_loss": LossTermComponent,
    "preference_loss": PreferenceComponent,
    "reward": RewardComponent,
}
"""Kinds of plugins that a config gives fields of its own, next to the plugin's."""


def fields_in_config(kind: str) -> list[dict[str, Any]]:
    """The fields that every plugin of this kind has in a config, next to its own."""
    fields = fields_of(COMPONENTS[kind]) if kind in COMPONENTS else []
    return [field for field in fields if field["name"] != "name"]


def fields_of(model: type[BaseModel]) -> list[dict[str, Any]]:
    """Name, type, default, bounds and meaning of every field. Any: they go to JSON."""
    return [_field(name, info) for name, info in model.model_fields.items()]


def _field(name: str, info: FieldInfo) -> dict[str, Any]:
    required = info.is_required()
    default = None if required else info.get_default(call_default_factory=True, validated_data={})
    return {
        "name": name,
        "type": type_text(info.annotation).replace("plugin", f"{plugin_kind(name)} plugin"),
        "required": required,
        "default": None if default is PydanticUndefined else _plain(default),
        "description": info.description or "",
        "constraints": [text for item in info.metadata if (text := _bound(item))],
    }


def field_line(field: dict[str, Any]) -> str:
    """`name (type, default, bounds): meaning`."""
    value = "required" if field["required"] else f"default {value_text(field['default'])}"
    limits = f", {', '.join(field['constraints'])}" if field["constraints"] else ""
    about = f": {field['description']}" if field["description"] else ""
    return f"  {field['name']} ({field['type']}, {value}{limits}){about}"


def type_text(annotation: object) -> str:
    """An annotation in the words of YAML: `list of plugin`, `auto | cpu`, `float or null`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(arguments[0])
    if origin is Literal:
        return " | ".join(str(value) for value in arguments)
    if origin in (Union, types.UnionType):
        options = dict.fromkeys(type_text(option) for option in arguments)
        return " or ".join(options)
    if origin is tuple and arguments[-1:] == (Ellipsis,) or origin is list:
        return f"list of {type_text(arguments[0])}"
    if origin is tuple:
        return f"[{', '.join(map(type_text, arguments))}]"
    if origin is dict:
        return f"mapping of {type_text(arguments[1])}"
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, Component):
        return "plugin"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    if isinstance(annotation, type):
        return {"str": "text"}.get(annotation.__name__, annotation.__name__)
    return inspect.formatannotation(annotation)


def _bound(item: object) -> str:
    for name, sign in BOUNDS.items():
        if (limit := getattr(item, name, None)) is not None:
            return f"{sign} {limit:,}" if isinstance(limit, int) else f"{sign} {limit:g}"
    for name, text in (("min_length", "at least"), ("max_length", "at most")):
        if (limit := getattr(item, name, None)) is not None:
            return f"{text} {limit} long"
    pattern = getattr(item, "pattern", None)
    return f"matches {pattern}" if pattern else ""


def _plain(default: Any) -> Any:
    """A default as YAML has it: a section by what differs from its own defaults."""
    if isinstance(default, Component):
        fields = default.model_dump(mode="json", exclude_defaults=True)
        return default.name if set(fields) <= {"name"} else fields
    if isinstance(default, BaseModel):
        return default.model_dump(mode="json", exclude_defaults=True)
    if isinstance(default, tuple | list):
        return [_plain(item) for item in default]
    return default


def value_text(default: object) -> str:
    if default is None:
        return "null"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, str):
        text = default if len(default) <= 60 else f"{default[:57]}..."
        return repr(text) if "\n" in text or not text else text
    if isinstance(default, list):
        return f"[{', '.join(map(value_text, default))}]"
    if isinstance(default, dict):
        return f"{{{', '.join(f'{key}: {value_text(item)}' for key, item in default.items())}}}"
    return f"{default:g}" if isinstance(default, float) else str(default)
