"""Which settings of a resolved run are not what its presets and defaults would have made them."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from posttrain.core.config.loading import load_config
from posttrain.core.config.resolve import ResolvedRun, resolve
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.errors import PosttrainError
from posttrain.core.store.identity import flat

if TYPE_CHECKING:
    from posttrain.core.plugin_manager import PluginManager

# What says which stage it is, rather than how it works.
_GIVEN = ("kind", "inputs", "algorithm")
_ALWAYS_READ = ("model", "dataset")
_LEANED_ON = ("rewards", "environment", "sampler")
_NOT_SETTINGS = (
    "name",
    "description",
    "run_name",
    "limits",
    "cluster",
    "keep",
    "alarms",
    "plugin_files",
    "forked_from",
)


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting by its place in the YAML, with its default and the value that was used."""

    place: str
    default: object
    value: object


def differing_settings(resolved: ResolvedRun, manager: PluginManager) -> list[Setting]:
    """Every setting that differs from its default, in the order of the config.

    The default is that of the same stages with the same algorithms and plugins and nothing else
    set. A value that has no default (a required one) is listed with None. Sections that decide no
    result are left out.
    """
    used = resolved.config.model_dump(mode="json")
    default = _defaults(used, resolved, manager)
    found = [
        Setting(place, default.get(place), value)
        for place, value in flat(used)
        if place.split(".")[0] not in _NOT_SETTINGS and not _is_given(place)
    ]
    return [s for s in found if s.place not in default or default[s.place] != s.value]


def changes_yaml(settings: Sequence[Setting]) -> str:
    """The settings as YAML: by their place, the default and the value."""
    found = {s.place: {"default": s.default, "value": s.value} for s in settings}
    head = (
        "# What this run sets, where its algorithms, plugins and defaults would have it otherwise."
    )
    body: str = yaml.safe_dump(found, sort_keys=False, default_flow_style=False, allow_unicode=True)
    return f"{head}\n{body}"


def _is_given(place: str) -> bool:
    head, _, rest = place.partition(".")
    field = rest.partition(".")[2].split(".")[0]
    return head == "stages" and field in _GIVEN


def _defaults(
    used: Mapping[str, Any],  # Any: JSON
    resolved: ResolvedRun,
    manager: PluginManager,
) -> dict[str, object]:
    """The flat settings of the same run with nothing set that need not be."""
    stages: dict[str, Any] = {}
    for name, stage in used["stages"].items():
        fields = type(resolved.config.stages[name]).model_fields
        required = {key for key, field in fields.items() if field.is_required()}
        kept = {k: v for k, v in stage.items() if k in required | set(_GIVEN) and v is not None}
        if "algorithm" in kept:
            kept["algorithm"] = kept["algorithm"]["name"]
        if isinstance(resolved.config.stages[name], RlStage):
            # Other inputs are of rewards and critics that are not set here.
            kept["inputs"] = {k: v for k, v in stage["inputs"].items() if k in _ALWAYS_READ}
        stages[name] = kept
    fields = manager.find("task", used["task"]["name"]).cls.Config.model_fields
    needed = {"name"} | {key for key, field in fields.items() if field.is_required()}
    task = {key: value for key, value in used["task"].items() if key in needed}
    bare = {"name": used["name"], "task": task, "stages": stages}
    bare |= {"plugin_files": {name: str(path) for name, path in manager.files.paths.items()}}
    try:
        return dict(flat(_resolved(bare, manager).config.model_dump(mode="json")))
    except PosttrainError:
        # An algorithm needs more than its name (a reward that scores steps, float32): what others
        # lean on is taken as it is, and has no default then.
        for name, stage in stages.items():
            stage |= {k: v for k, v in used["stages"][name].items() if k in _LEANED_ON}
            stage["inputs"] = used["stages"][name]["inputs"]
        bare |= {"model": used["model"]}
        try:
            found = dict(flat(_resolved(bare, manager).config.model_dump(mode="json")))
        except PosttrainError:
            return {}
        return {place: value for place, value in found.items() if not _was_taken(place)}


def _was_taken(place: str) -> bool:
    head, _, rest = place.partition(".")
    return head == "model" or rest.partition(".")[2].split(".")[0] in _LEANED_ON


def _resolved(values: Mapping[str, Any], manager: PluginManager) -> ResolvedRun:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "defaults.yaml"
        path.write_text(yaml.safe_dump(dict(values)))
        return resolve(load_config([path], manager=manager), manager)
