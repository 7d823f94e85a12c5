"""The reference part of docs/algorithms.md: every built-in plugin and preset as Markdown."""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections import Counter
from collections.abc import Iterable
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from posttrain.core.config.presets import axes_of
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.plugin_manager import PluginEntry, PluginManager

KINDS = {
    "advantage": "Advantages",
    "policy_loss": "Policy losses",
    "aggregator": "Aggregators",
    "kl": "KL estimates",
    "kl_controller": "KL controllers",
    "rollout_correction": "Rollout corrections",
    "preference_loss": "Preference losses",
    "reward": "Rewards",
    "sampler": "Samplers",
    "task": "Tasks",
    "environment": "Environments",
    "tool": "Tools",
    "rollout_engine": "Rollout engines",
}
COMMON_FROM = 3
"""A field that so many plugins of a kind have alike is described once."""
BOUNDS = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}"}
NAMES = {float: "number", int: "whole number", str: "text", bool: "true or false"}
AXES = ("advantage", "policy_loss", "aggregator", "kl", "preference_loss")


def built_in(manager: PluginManager, kind: str) -> list[PluginEntry]:
    """The plugins of a kind that come with posttrain."""
    return [entry for entry in manager.entries(kind) if entry.package == "posttrain"]


# --- text -------------------------------------------------------------------------------------


def prose(text: str) -> str:
    """Plain text as Markdown: one line, arXiv numbers linked, nothing read as markup."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    plain = [part if part.startswith("`") else _escaped(part) for part in parts]
    return "".join(plain)


def _escaped(text: str) -> str:
    text = re.sub(r"([*<>\[\]|~])", r"\\\1", text)
    text = re.sub(r"\b(Sources?|Formula): ", r"**\1:** ", text)
    link = r"[arXiv:\1](https://arxiv.org/abs/\1)"
    return re.sub(r"arXiv:(\d{4}\.\d{4,5})", link, text)


def value(what: object) -> str:
    """A setting as YAML would have it, on one line."""
    plain = to_jsonable_python(what)
    return plain if isinstance(plain, str) else json.dumps(plain)


def type_name(annotation: Any) -> str:  # Any: whatever a field is annotated with
    """A type in words."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(f"`{part}`" for part in parts)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if part is type(None) else type_name(part) for part in parts)
    if origin is typing.Annotated:
        return type_name(parts[0])
    if origin is tuple:
        return f"list of {type_name(parts[0])}"
    return NAMES.get(annotation, "path" if annotation.__name__ == "Path" else "mapping")


def field_line(name: str, field: FieldInfo) -> str:
    """One setting: type, bounds, default, meaning."""
    bounds = [
        text.format(getattr(item, key))
        for item in field.metadata
        for key, text in BOUNDS.items()
        if hasattr(item, key)
    ]
    about = ", ".join([type_name(field.annotation), *bounds])
    default = field.get_default(call_default_factory=True, validated_data={})
    told = "required" if default is PydanticUndefined else f"default `{value(default)}`"
    return f"- `{name}` ({about}; {told}): {prose(field.description or '')}"


# --- plugins ----------------------------------------------------------------------------------


def common_fields(entries: Iterable[PluginEntry]) -> set[str]:
    """Field lines that several plugins share word for word."""
    lines = Counter(
        field_line(name, field)
        for entry in entries
        for name, field in entry.cls.Config.model_fields.items()
    )
    return {line for line, count in lines.items() if count >= COMMON_FROM}


def plugin_section(entry: PluginEntry, common: set[str]) -> str:
    """One plugin: what it is, its formula, facts and source, its fields."""
    summary, _, more = (inspect.getdoc(inspect.getmodule(entry.cls)) or "").partition("\n\n")
    about = inspect.getdoc(entry.cls) or ""
    formula, _, rest = about.partition("\n\n")
    if "Source" not in about and "Source" in more:
        rest = f"{rest}\n\n{more}"
    lines = [f"### `{entry.name}`", "", prose(summary), "", "```text", formula.strip(), "```"]
    for paragraph in rest.split("\n\n"):
        if paragraph.strip():
            lines += ["", prose(paragraph)]
    told = {n: field_line(n, f) for n, f in entry.cls.Config.model_fields.items()}
    own = [line for line in told.values() if line not in common]
    shared = [f"`{name}`" for name, line in told.items() if line in common]
    if own:
        lines += ["", *own]
    if shared:
        lines += ["", f"Also {', '.join(shared)}, as above."]
    return "\n".join(lines)


def kind_section(manager: PluginManager, kind: str, title: str) -> str:
    """All plugins of a kind, after the fields that they share."""
    entries = built_in(manager, kind)
    common = common_fields(entries)
    names = ", ".join(f"`{entry.name}`" for entry in entries)
    lines = [f"## {title}", "", f"`{kind}`: {names}."]
    if common:
        lines += ["", f"Settings that {COMMON_FROM} or more of them have alike:", ""]
        lines += sorted(common)
    return "\n\n".join(["\n".join(lines), *(plugin_section(e, common) for e in entries)])


def reference(manager: PluginManager) -> str:
    """Every kind but the presets."""
    return "\n\n".join(kind_section(manager, kind, title) for kind, title in KINDS.items())


# --- presets ----------------------------------------------------------------------------------


def presets(manager: PluginManager) -> str:
    """Every preset: one row of a table each, then what it says of itself."""
    rl = ["| preset | advantage | policy loss | aggregator | KL | besides |", "|---" * 6 + "|"]
    rest = ["| preset | preference loss | besides |", "|---|---|---|"]
    sections = []
    for entry in built_in(manager, "algorithm"):
        algorithm: Any = entry.cls(entry.cls.Config())  # Any: `expand` is of its own contract
        fields = algorithm.expand()
        cells: dict[str, list[str]] = {}
        for axis in axes_of(algorithm, manager):
            told = _component(axis.name, axis.kind, axis.fields, manager)
            cells.setdefault(axis.kind, []).append(told)
        besides = _besides({k: v for k, v in fields.items() if k not in AXES})
        link = f"[`{entry.name}`](#preset-{entry.name})"
        if algorithm.stage == "preference":
            rest.append(f"| {link} | {' + '.join(cells['preference_loss'])} | {besides} |")
        else:
            losses, kl = " + ".join(cells["policy_loss"]), _kl(fields)
            fixed = (cells["advantage"][0], losses, cells["aggregator"][0], kl, besides)
            rl.append(f"| {link} | {' | '.join(fixed)} |")
        sections.append(_preset_section(entry))
    return "\n\n".join(["\n".join(rl), "\n".join(rest), *sections])


def _preset_section(entry: PluginEntry) -> str:
    formula, _, rest = (inspect.getdoc(entry.cls) or "").partition("\n\n")
    other = getattr(entry.cls, "variant_of", None)
    recipe = f"Recipe: [configs/recipes/{other or entry.name}.yaml]"
    recipe += f"(../configs/recipes/{other or entry.name}.yaml)"
    recipe += f", of `{other}`, the preset that this one varies." if other else "."
    return "\n\n".join(
        [
            f'<a id="preset-{entry.name}"></a>\n### Preset `{entry.name}`',
            f"```text\n{formula.strip()}\n```",
            *(prose(paragraph) for paragraph in rest.split("\n\n")),
            recipe,
        ]
    )


def _component(name: str, kind: str, fields: dict[str, Any], manager: PluginManager) -> str:
    """A plugin with the settings in which a preset departs from the plugin's defaults."""
    own = manager.config(kind, name, {}).model_dump(mode="json")
    changed = [f"{key} {value(v)}" for key, v in fields.items() if own.get(key) != v]
    return f"`{name}`" + (f" ({', '.join(changed)})" if changed else "")


def _kl(fields: dict[str, Any]) -> str:
    """Where the KL to the reference stands, and its coefficient."""
    kl = RlStage.model_validate({"kind": "rl", **fields}).kl
    settings = kl.controller.fields()
    if kl.controller.name == "fixed" and settings.get("coef") == 0:
        return "none"
    told = ", ".join(f"{name} {value(v)}" for name, v in settings.items())
    return f"`{kl.estimator.name}` in the {kl.place}, `{kl.controller.name}` ({told})"


def _besides(fields: dict[str, Any]) -> str:
    """What a preset sets that is no plugin."""
    told = []
    for name, what in fields.items():
        if isinstance(what, dict):
            inner = ", ".join(f"{key} {value(v)}" for key, v in what.items())
            told.append(f"{name} ({inner})" if inner else name)
        else:
            told.append(f"{name} {value(what)}")
    return "; ".join(told)
