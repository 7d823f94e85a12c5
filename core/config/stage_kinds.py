"""Every kind of stage: its fields, what it reads and what it makes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import get_args, get_origin

from pydantic import BaseModel

from posttrain.core.config.base import Section, StageBase
from posttrain.core.config.dag import MAKES, OPTIONAL, REQUIRED
from posttrain.core.config.schema import RunConfig, Stage
from posttrain.core.store.artifacts import ArtifactKind


@dataclass(frozen=True, slots=True)
class StageKind:
    """One kind of stage. Inputs are roles with the kind of artifact that each takes."""

    kind: str
    cls: type[StageBase]
    makes: ArtifactKind
    required: Mapping[str, ArtifactKind]
    optional: Mapping[str, ArtifactKind]

    @property
    def reads(self) -> dict[str, ArtifactKind]:
        return {**self.required, **self.optional}

    @property
    def more_inputs(self) -> bool:
        """Whether rewards or a ranking may ask for inputs of their own, such as `reward_model`."""
        return bool({"rewards", "online"} & self.cls.model_fields.keys())


def stage_kinds() -> list[StageKind]:
    """All kinds, in the order in which a run usually has them."""
    union = get_args(get_args(Stage)[0])
    classes = {get_args(cls.model_fields["kind"].annotation)[0]: cls for cls in union}
    return [
        StageKind(kind, classes[kind], makes, REQUIRED[kind], OPTIONAL.get(kind, {}))
        for kind, makes in MAKES.items()
    ]


@dataclass(frozen=True, slots=True)
class SectionPlaces:
    """A section's model, and where a config has it: `model`, `stages.<rl>.optimizer`."""

    cls: type[BaseModel]
    places: tuple[str, ...]


def sections() -> dict[str, SectionPlaces]:
    """Every section of a config by the name of its field, those of the whole run first."""
    found: dict[str, SectionPlaces] = {}
    roots: list[tuple[str, type[BaseModel]]] = [("", RunConfig)]
    roots += [(f"stages.<{stage.kind}>.", stage.cls) for stage in stage_kinds()]
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
    """The sections that a field may hold; components and stages are none."""
    if isinstance(annotation, type):
        if issubclass(annotation, Section) and not issubclass(annotation, StageBase):
            yield annotation
    elif get_origin(annotation) is not dict:
        for argument in get_args(annotation):
            yield from _section_classes(argument)
