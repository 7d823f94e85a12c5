"""What pydantic refuses in a configuration, as sentences: where, what, and what was meant."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from posttrain.core.config.base import Component, StageBase
from posttrain.core.config.positions import Loc, dotted
from posttrain.core.config.schema import BUILT_IN, RunConfig
from posttrain.core.config.sections import OtherOptimizer
from posttrain.core.errors import ConfigError, nearest, shortlist

MAX_SHOWN = 10
StageClasses = Mapping[str, type[StageBase]]
"""The config class of each stage kind."""

# What pydantic puts into a place where values of two forms may stand.
UNION_TAGS = ("one", "many", "a number", "a schedule")
_FORM = re.compile(r"(function-(before|after|wrap|plain)|literal|nullable|list|tuple|dict)\[")
"""How a part begins by which pydantic names a form of value that has no tag."""


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
    kinds: StageClasses = BUILT_IN,
    also: Iterable[str] = (),
) -> list[str]:
    """One line for each problem in `error`, which came from validating a `root` at `prefix`.

    `kinds` are the stage kinds that were known, `also` fields that stand next to those of `root`
    without being its own.
    """
    lines = []
    details = _of_one_form(error.errors(include_url=False))
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
            model = _model_at(tuple(detail["loc"])[:-1], root, kinds)
            known = [*(model.model_fields if model else ()), *(also if len(inner) == 1 else ())]
            elsewhere = _elsewhere(str(loc[-1]), tuple(detail["loc"])[:-1], model, root, kinds)
            sentence = unknown_field(str(loc[-1]), detail["input"], known, owner, elsewhere)
        elif kind == "stage_without_kind":
            sentence = f"has no kind; add 'kind: ...', one of {list(kinds)}"
        elif kind == "stage_of_no_kind":
            given = detail["ctx"]["kind"]
            loc = (*loc, "kind")
            sentence = (
                f"no stage is of kind {short(given)}{nearest(str(given), kinds)} "
                f"(allowed: {list(kinds)})"
            )
        else:
            sentence = _wrong_value(kind, message, root, detail, kinds)
        lines.append(f"{where(loc)}: {dotted(loc) or 'the file'}: {sentence}")
    return list(dict.fromkeys(lines))


def _of_one_form(details: Sequence[Any]) -> list[Any]:  # Any: pydantic's own error records
    """The problems without those of other forms that a value could have had.

    Of the forms that a place takes (a name or a list) the one counts that explains most: the one
    whose problem lies deepest, and of equals the last.
    """
    found: dict[Loc, Any] = {}  # by where forms part; the problems of the form that counts
    for number, detail in enumerate(details):
        loc = tuple(detail["loc"])
        at = next((i for i, part in enumerate(loc) if _is_form(part)), None)
        place = (*loc, number) if at is None else loc[:at]
        form = None if at is None else loc[at]
        kept = found.get(place)
        if kept is None or (form != kept[0] and len(loc) >= len(kept[1][0]["loc"])):
            found[place] = (form, [detail])
        elif form == kept[0]:
            kept[1].append(detail)
    return [detail for _, kept in found.values() for detail in kept]


def _is_form(part: str | int) -> bool:
    return isinstance(part, str) and _FORM.match(part) is not None


def unknown_field(
    name: str, value: object, known: Iterable[str], owner: str, elsewhere: str = ""
) -> str:
    """The sentence for a field that does not exist, with the nearest that does.

    `elsewhere` is the place of a field of that name in another section.
    """
    names = sorted(known)
    allowed = f"(allowed: {shortlist(name, names)})" if names else "(it has no fields)"
    hint = f"; did you mean '{elsewhere}'?" if elsewhere else nearest(name, names)
    if elsewhere == name:
        hint = f"; '{name}' stands at the top level of the file"
    return f"unknown field of {owner}, got {short(value)}{hint} {allowed}"


# What other tools call a field of ours.
OTHER_NAMES = {
    "lr": "learning_rate",
    "wd": "weight_decay",
    "bs": "batch_size",
    "max_new_tokens": "max_response_length",
    "max_tokens": "max_response_length",
    "max_completion_length": "max_response_length",
    "grad_clip": "max_grad_norm",
    "max_steps": "steps",
    "num_steps": "steps",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "warmup": "warmup_steps",
    "group_size": "num_generations",
    "per_device_train_batch_size": "micro_batch_size",
    "model_name": "source",
    "model_name_or_path": "source",
    "r": "rank",
    "lora_r": "rank",
    "lora_alpha": "alpha",
    "max_seq_length": "max_model_len",
    "max_length": "max_model_len",
    "reward": "rewards",
    "system": "system_prompt",
}


# Where plugins' fields and inputs are that people write on a stage; the first whose section it has.
ON_A_STAGE = {
    **{role: (f"inputs.{role}",) for role in ("model", "reward_model", "baseline")},
    "beta": ("preference_loss.beta", "kl.controller.coef"),
    "kl_coef": ("kl.controller.coef",),
    "kl_beta": ("kl.controller.coef",),
    "clip_low": ("policy_loss.clip_low",),
    "clip_high": ("policy_loss.clip_high",),
    "clip_eps": ("policy_loss.clip_high",),
    "label_smoothing": ("preference_loss.label_smoothing",),
    "gamma": ("advantage.gamma",),
}


def _elsewhere(
    name: str,
    owner: Loc,
    model: type[BaseModel] | None,
    root: type[BaseModel],
    kinds: StageClasses,
) -> str:
    """Where a field `name` is, or one that is meant by it: below its owner, above, or in the root.

    As a person writes it: relative to the owner if it is below, else from the root. Empty if it is
    nowhere, or if the owner has a field that is spelt nearly so. `owner` is pydantic's place.
    """
    if model is None or difflib.get_close_matches(name, model.model_fields, 1, cutoff=0.85):
        return ""
    wanted = tuple(dict.fromkeys((name, OTHER_NAMES.get(name, name))))
    held = (at for at in ON_A_STAGE.get(name, ()) if at.split(".")[0] in model.model_fields)
    places = [*held, *(dotted(path) for path in _below(model) if path[-1] in wanted)]
    for end in range(len(owner) - 1, -1, -1):
        above = _model_at(owner[:end], root, kinds)
        fields = () if above is None else above.model_fields
        places += [dotted((*_schema_free(owner[:end], root), w)) for w in wanted if w in fields]
    if root is RunConfig:
        places += [dotted(path) for path in _below(RunConfig) if path[-1] in wanted]
        stages = kinds.values()
        inside = (path for stage in stages for path in _below(stage) if path[-1] in wanted)
        places += [dotted(("stages", "<stage>", *path)) for path in inside]
    return places[0] if places else ""


def _below(model: type[BaseModel]) -> Iterator[Loc]:
    """The places of fields in the sections of `model`, three levels deep, the nearest first."""
    level: list[tuple[Loc, type[BaseModel]]] = [((), model)]
    for _ in range(3):
        deeper: list[tuple[Loc, type[BaseModel]]] = []
        for place, section in level:
            for name, info in section.model_fields.items():
                if name != "name" or section is model:
                    yield (*place, name)
                inner = _models(info.annotation)
                if len(inner) == 1:
                    deeper.append(((*place, name), inner[0]))
        level = deeper


def _wrong_value(
    kind: str,
    message: str,
    root: type[BaseModel],
    detail: Mapping[str, Any],
    kinds: StageClasses,
) -> str:
    value = detail["input"]  # Any in the signature: pydantic's own error record
    loc = tuple(detail["loc"])
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        model = _model_at(loc, root, kinds)
        if model is not None and issubclass(model, Component):
            return f"must be a plugin name or {{name: ..., <its fields>}}, got {short(value)}"
        first = next(iter(model.model_fields), "") if model is not None else ""
        example = f", such as {{{first}: ...}}" if first else ""
        return f"must be a mapping of fields{example}, got {short(value)}"
    if root is RunConfig and loc[:1] == ("engine",):
        return f"must be 'auto' or the name of a rollout engine, got {short(value)}"
    if kind == "string_pattern_mismatch":
        pattern = (detail.get("ctx") or {}).get("pattern", "")
        if pattern == "^[a-z][a-z0-9_]*$":
            return (
                "a stage name must be lower-case letters, digits and '_', starting with a letter, "
                f"got {short(value)}"
            )
    if kind == "too_short":
        least = (detail.get("ctx") or {}).get("min_length")
        return f"must have at least {least} item(s), got {short(value)}"
    if kind == "literal_error" and isinstance(value, str):
        allowed = [part for part in str(detail.get("ctx", {}).get("expected", "")).split("'")]
        message += f"{nearest(value, [a for a in allowed[1::2]])}"
    if kind == "tuple_type":
        return f"must be a list, got {short(value)}"
    for start in ("Input should be ", "String should ", "Value error, "):
        if message.startswith(start):
            verb = {"Input should be ": "must be ", "String should ": "must "}.get(start, "")
            message = verb + message.removeprefix(start)
    return f"{message} (got {short(value)})"


def short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _schema_free(loc: Loc, root: type[BaseModel]) -> Loc:
    """`loc` without the parts that are added for unions, kinds of stages and keys."""
    if root is RunConfig and loc[:1] == ("stages",) and len(loc) > 2 and loc[2] != "[key]":
        loc = (*loc[:2], *loc[3:])
    if root is RunConfig and loc[:1] == ("engine",):
        return ("engine",)
    loc = tuple(part for part in loc if part not in UNION_TAGS and not _is_form(part))
    return loc[:-1] if loc and loc[-1] == "[key]" else loc


def _model_at(loc: Loc, root: type[BaseModel], kinds: StageClasses) -> type[BaseModel] | None:
    """The model whose fields live at pydantic's `loc`, which names the kind of a stage."""
    current: Any = root  # Any: type annotations have no common type
    for part in loc:
        models = _models(current)
        if part in UNION_TAGS or _is_form(part) or (models and isinstance(part, int)):
            continue  # one component, or an item of a list of them
        if models == [StageBase]:  # `loc` names its kind
            current = kinds.get(str(part))
        elif models:
            field = models[0].model_fields.get(str(part))
            current = field.annotation if field else None
        else:
            current = _item(current)
    models = _models(current)
    return models[0] if models else None


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    origin = get_origin(annotation)
    if origin is Annotated:
        return _models(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        found = [model for arg in get_args(annotation) for model in _models(arg)]
        return [model for model in found if model is not OtherOptimizer]  # its plugin has fields
    return []


def _item(annotation: Any) -> Any:
    """What a mapping or tuple annotation holds."""
    arguments = get_args(annotation)
    if get_origin(annotation) is dict:
        return arguments[1]
    return arguments[0] if get_origin(annotation) is tuple else None
