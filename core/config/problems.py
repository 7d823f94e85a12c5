"""Pydantic's errors as one readable line each: place, value, what is allowed, nearest spelling."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from posttrain.core.config.base import Component
from posttrain.core.config.dag import MAKES
from posttrain.core.config.marks import Loc, dotted
from posttrain.core.config.schema import RunConfig
from posttrain.core.errors import ConfigError, nearest

MAX_SHOWN = 10
STAGE_KINDS = tuple(MAKES)

# What pydantic puts into a place where one component or a list of them may stand.
UNION_TAGS = ("one", "many")


def raise_problems(problems: Sequence[str]) -> None:
    """Raise one `ConfigError` for all `problems` (a line each, ten at most); none is fine."""
    if not problems:
        return
    unique = list(dict.fromkeys(problems))
    if len(unique) == 1:
        raise ConfigError(unique[0])
    lines = [f"  {line}" for line in unique[:MAX_SHOWN]]
    if len(unique) > MAX_SHOWN:
        lines.append(f"  and {len(unique) - MAX_SHOWN} more")
    raise ConfigError("\n".join([f"{len(unique)} problems in the configuration:", *lines]))


def explain(
    error: ValidationError,
    where: Callable[[Loc], str],
    root: type[BaseModel] = RunConfig,
    prefix: Loc = (),
    title: str = "a run",
) -> list[str]:
    """One line for each problem in `error`, which came from validating a `root` at `prefix`."""
    lines = []
    details = error.errors(include_url=False)
    for detail in details:
        kind, message = detail["type"], detail["msg"]
        inner = _schema_free(tuple(detail["loc"]), root)
        if kind == "too_short" and any(
            len(d["loc"]) > len(detail["loc"]) and d["loc"][: len(detail["loc"])] == detail["loc"]
            for d in details
        ):
            continue  # a list whose items are wrong is reported as empty as well
        if root is RunConfig and detail["loc"][:2] == ("engine", "Component"):
            continue  # the other half of the union says it already
        loc = (*prefix, *inner)
        owner = dotted(loc[:-1]) if len(inner) > 1 else title
        if kind == "missing":
            sentence = f"is missing: {owner} needs '{loc[-1]}'"
        elif kind == "extra_forbidden":
            model = _model_at(tuple(detail["loc"])[:-1], root)
            known = list(model.model_fields) if model else []
            sentence = unknown_field(str(loc[-1]), detail["input"], known, owner)
        elif kind == "union_tag_not_found":
            sentence = f"has no kind; add 'kind: ...', one of {list(STAGE_KINDS)}"
        elif kind == "union_tag_invalid":
            tag = str((detail.get("ctx") or {}).get("tag"))
            loc = (*loc, "kind")
            sentence = f"no stage is of kind '{tag}'{nearest(tag, STAGE_KINDS)} (allowed: " + (
                f"{list(STAGE_KINDS)})"
            )
        else:
            sentence = _wrong_value(kind, message, root, detail)
        lines.append(f"{where(loc)}: {dotted(loc) or 'the file'}: {sentence}")
    return list(dict.fromkeys(lines))


def unknown_field(name: str, value: object, known: Iterable[str], owner: str) -> str:
    """The sentence for a field that does not exist, with the nearest that does."""
    names = sorted(known)
    allowed = f"(allowed: {names})" if names else "(it has no fields)"
    return f"unknown field of {owner}, got {_short(value)}{nearest(name, names)} {allowed}"


def _wrong_value(kind: str, message: str, root: type[BaseModel], detail: Mapping[str, Any]) -> str:
    value = detail["input"]  # Any in the signature: pydantic's own error record
    loc = tuple(detail["loc"])
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        model = _model_at(loc, root)
        if model is not None and issubclass(model, Component):
            return f"must be a plugin name or {{name: ..., <its fields>}}, got {_short(value)}"
        return f"must be a mapping of fields, got {_short(value)}"
    if root is RunConfig and loc[:1] == ("engine",):
        return f"must be 'auto' or the name of a rollout engine, got {_short(value)}"
    if kind == "string_pattern_mismatch":
        pattern = (detail.get("ctx") or {}).get("pattern", "")
        if pattern == "^[a-z][a-z0-9_]*$":
            return (
                "a stage name must be lower-case letters, digits and '_', starting with a letter, "
                f"got {_short(value)}"
            )
    if kind == "too_short":
        least = (detail.get("ctx") or {}).get("min_length")
        return f"must have at least {least} item(s), got {_short(value)}"
    if kind == "literal_error" and isinstance(value, str):
        allowed = [part for part in str(detail.get("ctx", {}).get("expected", "")).split("'")]
        message += f"{nearest(value, [a for a in allowed[1::2]])}"
    for start in ("Input should be ", "String should ", "Value error, "):
        if message.startswith(start):
            verb = {"Input should be ": "must be ", "String should ": "must "}.get(start, "")
            message = verb + message.removeprefix(start)
    return f"{message} (got {_short(value)})"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _schema_free(loc: Loc, root: type[BaseModel]) -> Loc:
    """`loc` without the parts that pydantic adds for unions and keys."""
    if root is RunConfig and loc[:1] == ("stages",) and len(loc) > 2 and loc[2] in STAGE_KINDS:
        loc = (*loc[:2], *loc[3:])
    if root is RunConfig and loc[:1] == ("engine",):
        return ("engine",)
    loc = tuple(part for part in loc if part not in UNION_TAGS)
    return loc[:-1] if loc and loc[-1] == "[key]" else loc


def _model_at(loc: Loc, root: type[BaseModel]) -> type[BaseModel] | None:
    """The model whose fields live at pydantic's `loc`, which names the kind of a stage."""
    current: Any = root  # Any: type annotations have no common type
    for part in loc:
        models = _models(current)
        if part in UNION_TAGS or (models and isinstance(part, int)):
            continue  # one component, or an item of a list of them
        if len(models) > 1:  # the union of stages, narrowed by the kind in `loc`
            current = next((m for m in models if part in get_args(_kind(m))), None)
        elif models:
            field = models[0].model_fields.get(str(part))
            current = field.annotation if field else None
        else:
            current = _item(current)
    models = _models(current)
    return models[0] if models else None


def _kind(model: type[BaseModel]) -> Any:
    field = model.model_fields.get("kind")
    return field.annotation if field else None


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    origin = get_origin(annotation)
    if origin is Annotated:
        return _models(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [model for arg in get_args(annotation) for model in _models(arg)]
    return []


def _item(annotation: Any) -> Any:
    """What a mapping or tuple annotation holds."""
    arguments = get_args(annotation)
    if get_origin(annotation) is dict:
        return arguments[1]
    return arguments[0] if get_origin(annotation) is tuple else None
