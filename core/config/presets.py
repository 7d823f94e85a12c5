"""What an algorithm preset amounts to: one plugin per axis, its formula, every field's value."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from posttrain.core.config.components import preference_components, rl_components
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.config.supervised_stages import PreferenceStage

if TYPE_CHECKING:
    from posttrain.core.plugin_manager import PluginManager

# Axes that say nothing of an algorithm.
_NOT_SHOWN = ("algorithm",)


@dataclass(frozen=True, slots=True)
class Axis:
    """One plugin of a preset; `place` is its place in a stage, `fields` all its settings."""

    place: str
    kind: str
    name: str
    formula: str
    fields: dict[str, Any]  # Any: plugin settings as they go to YAML


def axes_of(algorithm: Any, manager: PluginManager) -> list[Axis]:
    """The axes that `algorithm`, a preset, expands to. Any: the contract would import torch."""
    fields = {"kind": algorithm.stage, **algorithm.expand()}
    if algorithm.stage == "preference":
        components = preference_components(PreferenceStage.model_validate(fields))
    else:
        components = rl_components(RlStage.model_validate(fields))
    axes = []
    for path, kind, component in components:
        if path[0] in _NOT_SHOWN:
            continue
        entry = manager.find(kind, component.name)
        config = manager.config(kind, component.name, component.fields())
        place = ".".join(str(part) for part in path)
        axes.append(
            Axis(place, kind, entry.name, formula_of(entry.cls), config.model_dump(mode="json"))
        )
    return axes


def formula_of(cls: type) -> str:
    doc = inspect.getdoc(cls) or ""
    return " ".join(doc.split("\n\n", 1)[0].split())
