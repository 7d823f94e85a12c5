"""Every kind of stage by its config, and every section with the places that a config has it in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from pydantic import BaseModel

from posttrain.core.config.base import Section, StageBase
from posttrain.core.config.schema import RunConfig
from posttrain.core.config.sections import OtherOptimizer

if TYPE_CHECKING:
    from posttrain.core.plugin_manager import PluginManager


def stage_configs(manager: PluginManager) -> dict[str, type[StageBase]]:
    """The config of each kind of stage that is installed."""
    return {entry.name: entry.cls.Config for entry in manager.entries("stage")}


def takes_more_inputs(stage: type[StageBase]) -> bool:
    """Whether its rewards or ranking may ask for inputs of their own, such as `reward_model`."""
    return bool({"rewards", "online"} & stage.model_fields.keys())


@dataclass(frozen=True, slots=True)
class SectionPlaces:
    """A section's model, and where a config has it: `model`, `stages.<rl>.optimizer`."""

    cls: type[BaseModel]
    places: tuple[str, ...]


def sections(manager: PluginManager) -> dict[str, SectionPlaces]:
    """Every section of a config by the name of its field, those of the whole run first."""
    found: dict[str, SectionPlaces] = {}
    roots: list[tuple[str, type[BaseModel]]] = [("", RunConfig)]
    roots += [(f"stages.<{kind}>.", cls) for kind, cls in stage_configs(manager).items()]
    while roots:
        place, model = roots.pop(0)
        for name, info in model.model_fields.items():
            for cls in _section_classes(info.annotation):
                known = found.get(name)
                places = known.places if known else ()
                found[name] = SectionPlaces(cls, (*places, f"{place}{name}"))
                roots.append((f"{place}{name}.", cls))
    return found


def _section_classes(annotation: object) -> Iterator[type[BaseModel]]:
    """The sections that a field may hold; components and stages are none.

    Nor is an optimizer of another name than AdamW: its fields are those of a plugin.
    """
    if isinstance(annotation, type):
        if issubclass(annotation, Section) and annotation is not OtherOptimizer:
            yield annotation
    else:
        for argument in get_args(annotation):
            yield from _section_classes(argument)
