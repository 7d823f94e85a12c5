"""The JSON Schema of a configuration, with the fields of every installed plugin.

Editors complete and check YAML with it. It says what one place may hold; what several places must
agree on (inputs that exist, batches that divide) is checked by `posttrain validate`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import models_json_schema

from posttrain.core.config.base import StageBase
from posttrain.core.config.schema import RunConfig
from posttrain.core.config.stage_kinds import stage_configs, takes_more_inputs
from posttrain.core.contracts.stage import StageName

if TYPE_CHECKING:
    from posttrain.core.plugin_manager import PluginEntry, PluginManager

DRAFT = "http://json-schema.org/draft-07/schema#"
"""The draft that editors' YAML servers support in full."""
LOCAL_FILE = r"\.py:[A-Za-z_]\w*$"
"""A plugin in a file of the user's own: `my_rewards.py:Brief`."""
JSON = dict[str, Any]  # Any: a schema is a tree of JSON values

# Fields that hold a plugin of a kind with another name than the field.
FIELD_KINDS = {
    "engine": "rollout_engine",
    "rewards": "reward",
    "tools": "tool",
    "tasks": "task",
    "distillation": "distillation_loss",
    "entropy_aggregator": "aggregator",
    "estimator": "kl",
    "controller": "kl_controller",
    "plugin": "rollout_correction",
}


def plugin_kind(field: str) -> str:
    """The kind of plugin that a field of this name holds, if it holds one."""
    return FIELD_KINDS.get(field, field)


def json_schema(manager: PluginManager) -> JSON:
    """The schema of a whole configuration file, as draft 7."""
    return _Builder(manager).build()


class _Builder:
    """Pydantic's schema of the models, completed by what the plugins and stage kinds say."""

    def __init__(self, manager: PluginManager) -> None:
        self.entries: dict[str, list[PluginEntry]] = {}
        for entry in manager.entries():
            self.entries.setdefault(entry.kind, []).append(entry)
        self.stages = stage_configs(manager)
        self.doc = {entry.name: about(entry.cls) for entry in manager.entries("stage")}
        models: list[type[BaseModel]] = [
            RunConfig,
            *(entry.cls.Config for entries in self.entries.values() for entry in entries),
        ]
        references, schema = models_json_schema(
            [(model, "validation") for model in dict.fromkeys(models)]
        )
        self.refs = {model: str(ref["$ref"]) for (model, _), ref in references.items()}
        self.definitions: JSON = schema["$defs"]
        self.components = {  # models of a plugin by name with fields of its own
            f"#/$defs/{name}"
            for name, definition in self.definitions.items()
            if definition.get("additionalProperties") is True and "name" in definition["properties"]
        }

    def build(self) -> JSON:
        found: JSON = {}
        for name, definition in self.definitions.items():
            found[name] = self._completed(name, definition)
        pending = list(_references(found))
        while pending:  # definitions of plugins, made when a place first refers to them
            ref = pending.pop()
            name = ref.removeprefix("#/$defs/")
            if name not in found:
                found[name] = self._component(*name.split("."))
                pending += _references(found[name])
        run = found[self._name(RunConfig)]
        source = run["properties"]["model"]
        run["properties"]["model"] = {
            "anyOf": [{"type": "string", "minLength": 1}, source],
            "description": "the base model: its source, or the fields of section `model`",
        }
        run["properties"]["stages"] = {
            "type": "object",
            "minProperties": 1,
            "propertyNames": TypeAdapter(StageName).json_schema(),
            "additionalProperties": {"$ref": "#/$defs/stage"},
            "description": "the DAG: each stage by a name of your choice",
        }
        found["stage"] = self._stage()
        for stage in self.stages.values():
            self._inputs(found[self._name(stage)], stage)
        root = {
            "$schema": DRAFT,
            "title": "posttrain configuration",
            **{key: value for key, value in run.items() if key != "title"},
            "$defs": found,
        }
        schema: dict[str, Any] = _draft_7(_reachable(root))  # Any: JSON
        return schema

    def _name(self, model: type[BaseModel]) -> str:
        return self.refs[model].removeprefix("#/$defs/")

    def _completed(self, name: str, definition: JSON) -> JSON:
        """A model's schema: plugins by kind, and one value where a list of one may stand."""
        result = copy.deepcopy(definition)
        for field, value in result.get("properties", {}).items():
            kind = plugin_kind(field)
            known = kind if kind in self.entries else None
            result["properties"][field] = self._field(value, known)
        if name == "DataSource":
            result = {"anyOf": [{"type": "string", "minLength": 1}, result]}
        return result

    def _field(self, value: Any, kind: str | None) -> Any:
        if isinstance(value, list):
            return [self._field(item, kind) for item in value]
        if not isinstance(value, dict):
            return value
        ref = value.get("$ref")
        if ref in self.components:
            name = str(ref).removeprefix("#/$defs/")
            own = {"$ref": f"#/$defs/{name}.{kind}"} if kind else _any_component(name)
            return {**value, **own} if kind else {**_without(value, "$ref"), **own}
        result = {
            key: item if key in ("default", "const", "enum") else self._field(item, kind)
            for key, item in value.items()
            if key != "discriminator"
        }
        if "oneOf" in result:  # of one component or many
            result["anyOf"] = result.pop("oneOf")
        if result.get("type") == "array" and isinstance(result.get("items"), dict):
            about = {k: result.pop(k) for k in ("description", "default", "title") if k in result}
            result = {**about, "anyOf": [result, result["items"]]}
        if kind == "rollout_engine" and "anyOf" in result:
            strings = [item for item in result["anyOf"] if item != {"type": "string"}]
            result["anyOf"] = [{"const": "auto"}, *strings]
        return result

    def _component(self, *parts: str) -> JSON:
        """`Model.kind`: any plugin of a kind, by name or with fields; `Model.kind.name`: one."""
        model, kind = parts[0], parts[1]
        if len(parts) > 2:
            return self._plugin(model, kind, ".".join(parts[2:]))
        entries = self.entries.get(kind, [])
        bare = [entry for entry in entries if not self.definition(entry).get("required")]
        names = {"type": "string", **_choice(bare)}
        options: list[JSON] = [names] if bare else []
        fields: JSON = {"name": {"anyOf": [_choice(entries), {"pattern": LOCAL_FILE}]}}
        cases = [
            {
                "if": {"properties": {"name": {"const": entry.name}}, "required": ["name"]},
                "then": {"$ref": f"#/$defs/{model}.{kind}.{entry.name}"},
            }
            for entry in entries
        ]
        whole = {"type": "object", "required": ["name"], "properties": fields, "allOf": cases}
        local = {"type": "string", "pattern": LOCAL_FILE}
        return {"title": kind, "anyOf": [*options, local, whole]}

    def _plugin(self, model: str, kind: str, name: str) -> JSON:
        entry = next(entry for entry in self.entries[kind] if entry.name == name)
        own = self._completed("", self.definition(entry))
        place = self._completed(model, self.definitions[model])["properties"]
        return {
            "type": "object",
            "title": f"{kind} {name}",
            "description": about(entry.cls),
            "properties": {
                **own.get("properties", {}),
                **place,
                "name": {"const": name, "description": about(entry.cls)},
            },
            "required": ["name", *own.get("required", [])],
            "additionalProperties": False,
        }

    def definition(self, entry: PluginEntry) -> JSON:
        found: JSON = self.definitions[self._name(entry.cls.Config)]
        return found

    def _stage(self) -> JSON:
        installed = {
            "enum": list(self.stages),
            "enumDescriptions": [self.doc[kind] for kind in self.stages],
        }
        kinds = {
            "anyOf": [installed, {"type": "string", "pattern": LOCAL_FILE}],
            "description": "what the stage does (posttrain show)",
        }
        return {
            "type": "object",
            "required": ["kind"],
            "properties": {"kind": kinds},
            "allOf": [
                {
                    "if": {"properties": {"kind": {"const": kind}}, "required": ["kind"]},
                    "then": {"$ref": self.refs[stage]},
                }
                for kind, stage in self.stages.items()
            ],
        }

    def _inputs(self, definition: JSON, stage: type[StageBase]) -> None:
        """The roles of a stage's inputs. Rewards may ask for more of them, by name."""
        known = definition["properties"]["inputs"]
        one = known["additionalProperties"]
        read = {**stage.reads, **stage.may_read}
        roles = {role: f"a stage that makes: {made}" for role, made in read.items()}
        definition["properties"]["inputs"] = {
            "type": "object",
            "description": known["description"],
            "properties": {role: {**one, "description": text} for role, text in roles.items()},
            "required": list(stage.reads),
            "additionalProperties": one if takes_more_inputs(stage) else False,
        }
        if stage.reads:
            definition["required"] = [*definition.get("required", []), "inputs"]


def about(cls: type) -> str:
    """The first paragraph of a class's docstring, as one line."""
    return " ".join((inspect.getdoc(cls) or "").split("\n\n", 1)[0].split())


def _choice(entries: Sequence[PluginEntry]) -> JSON:
    """Plugins by name, each with what it is."""
    return {
        "enum": [entry.name for entry in entries],
        "enumDescriptions": [about(entry.cls) for entry in entries],
    }


def _any_component(name: str) -> JSON:
    """A plugin of a kind that the field's name does not tell."""
    return {"anyOf": [{"type": "string"}, {"$ref": f"#/$defs/{name}"}]}


def _without(value: Mapping[str, Any], key: str) -> JSON:
    return {name: item for name, item in value.items() if name != key}


def _references(value: object) -> Iterator[str]:
    """Every `$ref` in a schema."""
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for item in value.values():
            yield from _references(item)
    elif isinstance(value, list):
        for item in value:
            yield from _references(item)


def _reachable(root: JSON) -> JSON:
    """The schema without definitions that nothing refers to."""
    definitions = root["$defs"]
    kept: set[str] = set()
    waiting = list(_references(_without(root, "$defs")))
    while waiting:
        name = waiting.pop().removeprefix("#/$defs/")
        if name not in kept:
            kept.add(name)
            waiting += _references(definitions[name])
    return {**root, "$defs": {name: definitions[name] for name in sorted(kept)}}


def _draft_7(value: Any) -> Any:
    """Draft 2020-12 as draft 7: no keyword next to `$ref`, and tuples as lists of items."""
    if isinstance(value, list):
        return [_draft_7(item) for item in value]
    if not isinstance(value, dict):
        return value
    result = {
        key: item if key in ("default", "const", "enum") else _draft_7(item)
        for key, item in value.items()
    }
    if "prefixItems" in result:
        result["items"] = result.pop("prefixItems")
    if "$ref" in result and len(result) > 1:
        result["allOf"] = [{"$ref": result.pop("$ref")}]
    return result
