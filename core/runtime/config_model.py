"""The base of every model of configuration: unknown keys and meaningless numbers are errors."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

LARGEST = 1_000_000_000
"""Bound on the size of a number whose field declares no bound of its own on that side."""


class ConfigModel(BaseModel):
    """Base of sections, of plugin configs and of their parts. Values are frozen.

    Refused for every field: keys that do not exist, NaN and infinity, true and false where a number
    is expected, and numbers beyond `LARGEST` in size unless the field's own bound allows them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    largest: ClassVar[int] = LARGEST

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:  # Any: from YAML
        if _has_boolean(value) and _numeric(cls, str(info.field_name)):
            raise ValueError("must be a number, not true or false")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _of_sane_size(cls, value: Any, info: ValidationInfo) -> Any:  # Any: of any field's type
        name = str(info.field_name)
        for number in _numbers(value) if _numeric(cls, name) else ():
            if number > cls.largest and not _bounded(cls, name, "le", "lt"):
                raise ValueError(f"must be at most {cls.largest}")
            if number < -cls.largest and not _bounded(cls, name, "ge", "gt"):
                raise ValueError(f"must be at least {-cls.largest}")
        return value


def _has_boolean(value: object) -> bool:
    if isinstance(value, list | tuple):
        return any(isinstance(item, bool) for item in value)
    return isinstance(value, bool)


def _numbers(value: object) -> list[float]:
    values = value if isinstance(value, list | tuple) else (value,)
    return [item for item in values if isinstance(item, int | float)]


@cache
def _numeric(cls: type[BaseModel], name: str) -> bool:
    """Whether the field takes numbers, and no booleans."""
    found = leaves(cls.model_fields[name].annotation)
    return bool(found & {int, float}) and bool not in found


@cache
def _bounded(cls: type[BaseModel], name: str, *bounds: str) -> bool:
    metadata = _metadata(cls.model_fields[name])
    return any(getattr(item, bound, None) is not None for item in metadata for bound in bounds)


def _metadata(field: FieldInfo) -> list[object]:
    """The constraints of a field and those inside its annotation."""
    found = list(field.metadata)
    waiting: list[Any] = [field.annotation]  # Any: annotations have no common type
    while waiting:
        annotation = waiting.pop()
        if get_origin(annotation) is Annotated:
            for item in get_args(annotation)[1:]:
                found += item.metadata if isinstance(item, FieldInfo) else [item]
        elif get_origin(annotation) is not Literal:
            waiting += get_args(annotation)
            continue
        waiting += get_args(annotation)[:1] if get_origin(annotation) is Annotated else ()
    return found


def leaves(annotation: Any) -> frozenset[Any]:  # Any: annotations have no common type
    """The types that an annotation is made of, a literal's values as their types."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return frozenset(type(value) for value in arguments)
    if origin is Annotated:
        return leaves(arguments[0])
    if not arguments:
        return frozenset({annotation})
    return frozenset().union(*(leaves(part) for part in arguments))
