"""Components of an rl stage, and the values that an algorithm preset gives them."""

from __future__ import annotations

import inspect
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from posttrain.core.config.base import Component, StageBase
from posttrain.core.config.positions import Loc
from posttrain.core.config.preference_stages import PreferenceStage
from posttrain.core.config.rl_stage import CorrectionSection, LossTermComponent, RlStage
from posttrain.core.config.sections import OptimizerBase

if TYPE_CHECKING:
    from posttrain.core.plugin_manager import PluginManager


# Places of an rl stage that hold a component, with the plugin kind each takes. Places that are null
# are left alone; `rewards` and a list of policy losses are walked item by item.
RL_COMPONENTS: dict[tuple[str, ...], str] = {
    ("algorithm",): "algorithm",
    ("sampler",): "sampler",
    ("advantage",): "advantage",
    ("advantage_transform",): "advantage_transform",
    ("policy_loss",): "policy_loss",
    ("distillation",): "distillation_loss",
    ("aggregator",): "aggregator",
    ("entropy_aggregator",): "aggregator",
    ("entropy_controller",): "entropy_controller",
    ("kl", "estimator"): "kl",
    ("kl", "controller"): "kl_controller",
    ("critic", "aggregator"): "aggregator",
    ("rollout_correction", "plugin"): "rollout_correction",
}


def rl_components(stage: RlStage) -> list[tuple[Loc, str, Component]]:
    """(place, plugin kind, component) of every component of an rl stage but its rewards."""
    found: list[tuple[Loc, str, Component]] = []
    for path, kind in RL_COMPONENTS.items():
        section: Any = stage  # Any: a section of whatever class
        for part in path[:-1]:
            section = getattr(section, part)
        value = getattr(section, path[-1], None)
        if isinstance(value, tuple):
            found += [((*path, index), kind, item) for index, item in enumerate(value)]
        elif value is not None:
            found.append((path, kind, value))
    for place, _, component in list(found):
        if isinstance(component, LossTermComponent) and component.aggregator is not None:
            found.append(((*place, "aggregator"), "aggregator", component.aggregator))
    return found


def tool_components(environment: Mapping[str, object]) -> list[tuple[int, Component]]:
    """(place in `tools`, component) of the tools that an environment's fields name."""
    return _listed(environment.get("tools"))


SAID_BY_MIXTURE = ("weight", "label")
"""What a mixture says of a task next to the task's own fields."""


def task_components(task: Mapping[str, object]) -> list[tuple[int, Component]]:
    """(place in `tasks`, component) of the tasks that a task's fields name; without what the
    mixture says of each."""
    parts = task.get("tasks")
    plain = [
        {k: v for k, v in part.items() if k not in SAID_BY_MIXTURE}
        if isinstance(part, Mapping)
        else part
        for part in (parts if isinstance(parts, list) else ())
    ]
    return _listed(plain)


def _listed(named: object) -> list[tuple[int, Component]]:
    """The components of a list; what is none is reported by the plugin that has the list."""
    found: list[tuple[int, Component]] = []
    for index, value in enumerate(named if isinstance(named, list) else ()):
        try:
            found.append((index, Component.model_validate(value)))
        except ValidationError:
            continue
    return found


def preference_components(stage: PreferenceStage) -> list[tuple[Loc, str, Component]]:
    """(place, plugin kind, component) of every component of a preference stage."""
    found: list[tuple[Loc, str, Component]] = [(("algorithm",), "algorithm", stage.algorithm)]
    terms = stage.preference_loss
    if not isinstance(terms, tuple):
        return [*found, (("preference_loss",), "preference_loss", terms)]
    for index, term in enumerate(terms):
        found.append((("preference_loss", index), "preference_loss", term))
    return found


def optimizers_of(stage: StageBase) -> list[tuple[Loc, OptimizerBase]]:
    """(place, section) of each optimizer of a stage."""
    own = ("critic", "implicit_prm")
    holders: list[tuple[Loc, object]] = [((), stage)]
    holders += [((name,), getattr(stage, name, None)) for name in own]
    found = (
        ((*place, "optimizer"), getattr(holder, "optimizer", None)) for place, holder in holders
    )
    return [(place, section) for place, section in found if isinstance(section, OptimizerBase)]


def put(values: Any, path: Loc, filled: dict[str, object]) -> None:
    """Set `values[path]`, keeping what a deeper place has filled in. Any: nested YAML values."""
    for part in path[:-1]:
        values = values[part]
    values[path[-1]] = filled


def from_stage(
    kind: str, filled: dict[str, object], stage: RlStage, needs: Container[str] = ()
) -> dict[str, object]:
    """A component's fields, those that were left null filled with what the stage itself says.

    An aggregator that divides by a constant length gets the response limit; an advantage that
    weighs reward components (it `needs` that column) gets the rewards' weights; a reward that
    bounds lengths the response limit, and for the buffer before the bound a fifth of it (DAPO's
    4,096 of 20,480).
    """
    if kind == "aggregator" and filled.get("norm_length", 0) is None:
        return {**filled, "norm_length": stage.generation.max_response_length}
    if "reward_components" in needs and filled.get("weights", ()) is None:
        return {**filled, "weights": [reward.weight for reward in stage.rewards]}
    if kind == "reward" and {"max_length", "buffer_length"} <= set(filled):
        longest, buffer = filled["max_length"], filled["buffer_length"]
        longest = stage.generation.max_response_length if longest is None else longest
        assert isinstance(longest, int)
        return {
            **filled,
            "max_length": longest,
            "buffer_length": longest // 5 if buffer is None else buffer,
        }
    return filled


def with_default_correction(stage: RlStage, raw: Mapping[str, Any], lag: int) -> RlStage:
    """`stage` with `tis_token` where samples may be older than the policy and nothing is said.

    `raw` is the stage as the user wrote it; `lag` is how much older than the engine's policy the
    sampler's groups may be. Any: nested YAML values.
    """
    said = "rollout_correction" in raw or stage.rollout_correction != CorrectionSection()
    if said or stage.max_staleness + lag == 0:
        return stage
    section = CorrectionSection(plugin=Component(name="tis_token"))
    return stage.model_copy(update={"rollout_correction": section})


def merge_fields(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` wins field by field. A component of another name replaces the whole component."""
    merged = dict(under)
    for key, value in over.items():
        known = merged.get(key)
        if isinstance(known, str) and isinstance(value, Mapping) and "name" in value:
            known = {"name": known}
        if not isinstance(known, Mapping):
            merged[key] = value
            continue
        fields = {"name": value} if isinstance(value, str) else value
        if not isinstance(fields, Mapping) or fields.get("name") != known.get("name"):
            merged[key] = value
        else:
            merged[key] = merge_fields(known, fields)
    return merged


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
