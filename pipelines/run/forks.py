"""Stages whose first steps are those of another run: finding these, and what may differ after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.core.config.base import BASE_MODEL
from posttrain.core.config.fork_section import ForkSection, StepStage
from posttrain.core.config.loading import load_config
from posttrain.core.config.rl_stage import CriticSection, ImplicitPrmSection, RlStage
from posttrain.core.errors import ConfigError, ResourceError
from posttrain.core.store.run_record import RunRecord, require_own_steps, runs_of

if TYPE_CHECKING:
    from posttrain.core.config.schema import RunConfig

NEW_RUN = "for that, start a run of its own with `posttrain run`"
_MODEL_SETTINGS = ("dtype", "renderer")
"""Settings of the model that decide what a checkpoint's numbers are, or what tokens mean."""


@dataclass(frozen=True, slots=True)
class Parent:
    """A stage whose steps are shared: the runs of this home that have it, the oldest first."""

    fork: ForkSection
    runs: tuple[RunRecord, ...]
    config: RunConfig
    stage: StepStage

    @property
    def record(self) -> RunRecord:
        """The run that computed it."""
        return self.runs[0]

    @property
    def shown(self) -> str:
        """The stage and its run, as people read them."""
        return f"stage '{self.fork.name}' of run {self.record.run_id[:12]}"


def find_parent(fork: ForkSection, home: Path) -> Parent:
    """The stage that `fork` names; raises `ResourceError` where no run of the home has it."""
    found = [r for r in runs_of(home) if r.stages.get(fork.name) == fork.identity]
    if not found:
        raise ResourceError(
            f"no run in {home} has the stage that is to be forked ({fork.name}, identity "
            f"{fork.identity[:12]}...): name the home of that run with --home"
        )
    config = load_config([found[0].unchanged_config()], []).config
    stage = config.stages.get(fork.name)
    if not isinstance(stage, StepStage):
        raise ResourceError(f"{found[0].config} has no stage '{fork.name}' with steps to share")
    return Parent(fork, tuple(found), config, stage)


def check_forks(config: RunConfig, home: Path) -> None:
    """Raise where a stage cannot go on from the steps that it is to share."""
    for name, stage in config.stages.items():
        if isinstance(stage, StepStage) and stage.fork is not None:
            parent = find_parent(stage.fork, home)
            check_settings(name, config, parent)
            nearest_checkpoint(parent, home)


def check_settings(name: str, config: RunConfig, parent: Parent) -> None:
    """Raise `ConfigError` for a change that the optimizer's state cannot go on with."""
    stage, fork = config.stages[name], parent.fork
    assert isinstance(stage, StepStage)
    place = f"stages.{name}"
    if name != fork.name:
        raise ConfigError(
            f"{place}.fork: names {parent.shown}, expected a stage of the same name, from which "
            f"its draws follow; rename this stage to '{fork.name}'"
        )
    if stage.kind != parent.stage.kind:
        raise ConfigError(
            f"{place}: is of kind '{stage.kind}', and {parent.shown} of kind "
            f"'{parent.stage.kind}'; keep the kind; {NEW_RUN}"
        )
    _same("seed", config.seed, parent.config.seed, "to draw otherwise after the fork, set --seeds")
    for setting in _MODEL_SETTINGS:
        now, before = getattr(config.model, setting), getattr(parent.config.model, setting)
        _same(f"model.{setting}", now, before, NEW_RUN)
    _check_trained(place, stage, parent.stage)
    if isinstance(stage, RlStage) and isinstance(parent.stage, RlStage):
        for part in ("critic", "implicit_prm"):
            _check_part(f"{place}.{part}", getattr(stage, part), getattr(parent.stage, part))
    _check_origin(name, config, parent)


def _same(place: str, now: object, before: object, instead: str) -> None:
    if now != before:
        raise ConfigError(
            f"{place}: is {_plain(now)}, and {_plain(before)} in the run that is forked, whose "
            f"steps are shared; keep it; {instead}"
        )


def _plain(value: object) -> str:
    found = value.model_dump(mode="json") if hasattr(value, "model_dump") else value
    if isinstance(found, dict):
        return str(found.get("name") or found)
    return "null" if found is None else str(found)


def _check_trained(place: str, now: Any, before: Any) -> None:  # Any: sections of several classes
    """What a checkpoint's tensors are of: the optimizer and its form, and the adapter."""
    _same(f"{place}.lora", now.lora, before.lora, NEW_RUN)
    _same(f"{place}.optimizer.name", now.optimizer.name, before.optimizer.name, NEW_RUN)
    for field in ("moments", "rounding"):
        own, other = (getattr(each.optimizer, field, None) for each in (now, before))
        _same(f"{place}.optimizer.{field}", own, other, NEW_RUN)


def _check_part(
    place: str,
    now: CriticSection | ImplicitPrmSection | None,
    before: CriticSection | ImplicitPrmSection | None,
) -> None:
    if now is None:
        return  # one that is not needed any more is left behind
    if before is None:
        raise ConfigError(
            f"{place}: the run that is forked has none, so there is none to go on with after the "
            f"fork; leave it out; {NEW_RUN}"
        )
    _check_trained(place, now, before)


def _check_origin(name: str, config: RunConfig, parent: Parent) -> None:
    """The model that the stage begins with is the same, by what makes it."""
    here, there = (_makers(name, each) for each in (config, parent.config))
    if list(here) != list(there):
        raise ConfigError(
            f"stages.{name}.inputs.model: comes from {' <- '.join(here)}, and from "
            f"{' <- '.join(there)} in the run that is forked; keep it; {NEW_RUN}"
        )
    if here[next(reversed(here))] is None and config.model.source != parent.config.model.source:
        _same("model.source", config.model.source, parent.config.model.source, NEW_RUN)
    for maker, values in here.items():
        before = there[maker] or {}
        for field, value in (values or {}).items():
            _same(f"stages.{maker}.{field}", value, before.get(field), NEW_RUN)


def _makers(name: str, config: RunConfig) -> dict[str, Mapping[str, object] | None]:
    """The stages that make the model which stage `name` reads, each with its settings, back to the
    base model, which has none."""
    found: dict[str, Mapping[str, object] | None] = {}
    source = config.stages[name].inputs.get("model", BASE_MODEL)
    while source != BASE_MODEL and source not in found:
        stage = config.stages[source]
        without = {"fork", "checkpoint_every", *stage.without_effect}
        found[source] = stage.model_dump(mode="json", exclude=without)
        source = stage.inputs.get("model", BASE_MODEL)
    found[source] = None
    return found


def nearest_checkpoint(parent: Parent, home: Path) -> Path:
    """The newest whole checkpoint at or before the fork; raises `ResourceError` for none."""
    # They import torch, which a plan of a run without forks does not wait for.
    from posttrain.core.training.checkpoint import (
        DamagedCheckpoint,
        check_whole,
        starting_points,
        step_of,
    )
    from posttrain.pipelines.stage.files import checkpoint_folder

    fork = parent.fork
    found = starting_points(checkpoint_folder(home, fork.name, fork.identity))
    if not found:
        require_own_steps(home, parent.record)
    damaged = []
    for folder in found:
        if step_of(folder) <= fork.step:
            try:
                check_whole(folder)
                return folder
            except DamagedCheckpoint:
                damaged.append(str(folder))
    steps = sorted({step_of(folder) for folder in found})
    there = f"of steps {', '.join(map(str, steps))}" if steps else "of no step"
    there += f", damaged are {', '.join(damaged)}" if damaged else ""
    later = [step for step in steps if step > fork.step]
    first = f"fork after step {later[0]} or later, or " if later else ""
    raise ResourceError(
        f"{parent.shown} cannot be forked after step {fork.step}: it keeps checkpoints {there}; "
        f"{first}run its config with keep.every set, such as `posttrain run "
        f"{parent.record.config} --no-cache --set keep.every=10`, and fork that run (while a stage "
        "runs, checkpoint_every makes them as well)"
    )
