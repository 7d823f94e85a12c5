"""What a stage's environment and sampler can and cannot be combined with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.core.errors import ConfigError

if TYPE_CHECKING:
    from posttrain.core.config.base import StageBase
    from posttrain.core.config.resolve import ResolvedRun
    from posttrain.core.config.sections import EnvironmentComponent
    from posttrain.core.plugin_manager import PluginManager

LIVE_FIELDS = ("at_once", "step_s", "episode_s", "max_failure_rate")
"""Limits of episodes that are played at once, which those of value environments are not."""
TURN_FIELDS = ("max_turns", "max_observation_tokens")
"""Limits of episodes that the run plays turn by turn, which those of a program are not."""


def check_environments(resolved: ResolvedRun, manager: PluginManager) -> None:
    """Raise `ConfigError` for an environment that its stage cannot use, or a task without one."""
    from posttrain.core.contracts import AnyEnvironment, Task

    config = resolved.config
    task = manager.build(Task, config.task.name, config.task.fields())
    named = [config.task, *task.parts().values()]
    classes = [(each, manager.find("task", each.name).cls) for each in named]
    judged = [each for each, cls in classes if issubclass(cls, Task) and cls.by_environment]
    for name, stage in config.stages.items():
        if not hasattr(stage, "environment"):
            continue
        component: EnvironmentComponent | None = stage.environment
        if component is None:
            if judged:
                raise ConfigError(
                    f"stages.{name}: the problems of task '{judged[0].name}' are judged by an "
                    f"environment, and the stage has none; add stages.{name}.environment"
                )
            continue
        environment = manager.find("environment", component.name).cls
        assert issubclass(environment, AnyEnvironment)
        if environment.needs_task not in ("", task.name):
            raise ConfigError(
                f"stages.{name}.environment: '{component.name}' plays the problems of task "
                f"'{environment.needs_task}' alone, and the task is '{task.name}'; set task.name: "
                f"{environment.needs_task}"
            )
        _refuse_fields(component, manager, name)
        if not _is_value(component, manager):
            _refuse_places(stage, component, resolved, manager, name)


def check_samplers(resolved: ResolvedRun, manager: PluginManager) -> None:
    """Raise `ConfigError` for a sampler of several tasks where there is one."""
    from posttrain.core.contracts import Sampler, Task

    chosen = resolved.config.task
    if manager.build(Task, chosen.name, chosen.fields()).parts():
        return
    for name, stage in resolved.config.stages.items():
        sampler = getattr(stage, "sampler", None)
        if sampler is None:
            continue
        cls = manager.find("sampler", sampler.name).cls
        if issubclass(cls, Sampler) and cls.needs_tasks:
            raise ConfigError(
                f"stages.{name}.sampler: '{sampler.name}' chooses among several tasks, and "
                f"'{chosen.name}' is one; set task: mixture with a list of tasks, or sampler: group"
            )


def _is_value(component: EnvironmentComponent, manager: PluginManager) -> bool:
    from posttrain.core.contracts import Environment

    return issubclass(manager.find("environment", component.name).cls, Environment)


def _refuse_fields(component: EnvironmentComponent, manager: PluginManager, name: str) -> None:
    """Fields that would change nothing."""
    from posttrain.core.contracts import PlayedEnvironment

    idle: tuple[str, ...]
    if _is_value(component, manager):
        idle = (*LIVE_FIELDS, "max_requests")
        why = f"all episodes of '{component.name}' take their turns together"
    elif issubclass(manager.find("environment", component.name).cls, PlayedEnvironment):
        idle = (*TURN_FIELDS, "step_s")
        why = f"a program plays the episodes of '{component.name}', and max_requests limits it"
    else:
        idle = ("max_requests",)
        why = f"max_turns limits the episodes of '{component.name}'"
    fields = type(component).model_fields
    changed = [f for f in idle if getattr(component, f) != fields[f].default]
    if changed:
        raise ConfigError(
            f"stages.{name}.environment: {', '.join(changed)} would change nothing: {why}; remove "
            f"{'it' if len(changed) == 1 else 'them'}"
        )


def _refuse_places(
    stage: StageBase,
    component: EnvironmentComponent,
    resolved: ResolvedRun,
    manager: PluginManager,
    name: str,
) -> None:
    """Samplers and nodes that need states as values."""
    from posttrain.core.contracts import Sampler

    named = getattr(stage, "sampler", None)
    if named is not None:
        sampler = manager.find("sampler", named.name).cls
        assert issubclass(sampler, Sampler)
        if sampler.needs_environment:
            raise ConfigError(
                f"stages.{name}.sampler: '{named.name}' goes on from one state of an environment "
                f"several times, and '{component.name}' holds its states itself; set sampler: group"
            )
    cluster = resolved.config.cluster
    if cluster is not None and cluster.environments is not None:
        raise ConfigError(
            f"cluster.environments: '{component.name}' (stages.{name}) plays its episodes in the "
            "run's process and connects to servers itself; remove cluster.environments"
        )
