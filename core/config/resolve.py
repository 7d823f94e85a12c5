"""Completes a loaded configuration: presets expanded, every plugin's fields checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import yaml
from pydantic import ValidationError

from posttrain.core.config import combinations, dag, preference_checks
from posttrain.core.config.base import NO_TASK, Component, StageBase
from posttrain.core.config.evaluation_stages import EvaluateStage
from posttrain.core.config.explaining import explain, raise_problems
from posttrain.core.config.gate_stages import PromoteStage
from posttrain.core.config.loading import LoadedConfig
from posttrain.core.config.positions import Loc
from posttrain.core.config.preference_stages import (
    PreferenceDataStage,
    PreferenceStage,
    ProcessRewardModelStage,
    RewardModelStage,
)
from posttrain.core.config.presets import (
    SAID_BY_MIXTURE,
    from_stage,
    merge_fields,
    optimizers_of,
    preference_components,
    put,
    rl_components,
    task_components,
    tool_components,
    with_default_correction,
)
from posttrain.core.config.rl_stage import RewardComponent, RlStage, reward_labels
from posttrain.core.config.schema import BUILT_IN, RunConfig, TransformStage, stage_classes
from posttrain.core.config.sections import EnvironmentComponent, OptimizerSection
from posttrain.core.config.sft_stage import SftStage
from posttrain.core.contracts import Reward
from posttrain.core.contracts.stage import faults_of_plugin
from posttrain.core.errors import ConfigError

if TYPE_CHECKING:
    from posttrain.core.plugin_manager import PluginManager


PresetStageT = TypeVar("PresetStageT", RlStage, PreferenceStage)


class PluginUse(NamedTuple):
    """A plugin that a stage uses, with the package it comes from and the digest of its source.

    `source` is empty for a built-in plugin, whose source is in posttrain's own digest.
    """

    kind: str
    name: str
    package: str
    version: str
    source: str = ""

    @property
    def origin(self) -> str:
        """Package, version and the start of the source's digest, as identities have it."""
        return f"{self.package} {self.version} {self.source[:12]}".rstrip()


def origins(plugins: Iterable[PluginUse]) -> list[tuple[str, str, str]]:
    """(kind, name, origin) of each plugin."""
    return [(use.kind, use.name, use.origin) for use in plugins]


@dataclass(frozen=True, slots=True)
class ResolvedRun:
    """A run with nothing left open.

    `config` has presets expanded and each component's fields filled with their defaults. `order`
    are the stages, each after those it reads. `plugins` are the plugins of each stage; an engine
    that is still `auto` is not among them.
    """

    config: RunConfig
    order: tuple[str, ...]
    plugins: Mapping[str, tuple[PluginUse, ...]]
    loaded: LoadedConfig = field(repr=False, compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)
    """What is probably a mistake in the data that were read, and hinders nothing."""

    def to_yaml(self) -> str:
        """The complete configuration; loading it again resolves to the same."""
        return yaml.safe_dump(self.config.model_dump(mode="json"), sort_keys=False)


def resolve(loaded: LoadedConfig, manager: PluginManager) -> ResolvedRun:
    """Expand presets, check every component, the inputs and the batch arithmetic."""
    manager.add_files(loaded.config.plugin_files)
    resolver = _Resolver(loaded, manager)
    values = loaded.config.model_dump(mode="json")
    task, used_task = resolver.task(loaded.config.task)
    values["task"] = task
    renderer = loaded.config.model.renderer
    values["model"]["renderer"], used_renderer = resolver.component(
        "renderer", renderer, ("model", "renderer")
    )
    used_engine: list[PluginUse] = []
    if loaded.config.engine != "auto":
        engine = Component.model_validate(loaded.config.engine)
        values["engine"], used_engine = resolver.component("rollout_engine", engine, ("engine",))
    plugins: dict[str, tuple[PluginUse, ...]] = {}
    stages: dict[str, StageBase] = {}
    for name, stage in loaded.config.stages.items():
        filled: StageBase
        used: list[PluginUse] = []
        if isinstance(stage, RlStage):
            filled, used = resolver.rl_stage(name)
        elif isinstance(stage, RewardModelStage):
            filled, used = resolver.reward_model_stage(name, stage)
        elif isinstance(stage, PreferenceStage):
            filled, used = resolver.preference_stage(name, stage)
        elif isinstance(stage, EvaluateStage):
            environment, used = resolver.environment(name, stage)
            evaluation = stage.evaluation or loaded.config.evaluation
            given = {"evaluation": evaluation, "environment": environment}
            filled = EvaluateStage.model_validate(stage.model_dump() | given)
        else:
            filled, used = resolver.stage(name, stage)
            if isinstance(filled, ProcessRewardModelStage):
                resolver.problems += preference_checks.check_process_reward_model(
                    name, filled, loaded
                )
        filled, used_optimizers = resolver.optimizers(name, filled)
        used += used_optimizers
        stages[name] = filled
        if "task" in stage.sections or stage.needs_task():
            used = [*used_task, *used_renderer, *used]
        if "engine" in stage.sections:
            used = [*used, *used_engine]
        plugins[name] = tuple(dict.fromkeys([*used, *resolver.code_of(stage)]))
    for name, stage in stages.items():
        if isinstance(stage, PromoteStage):  # it measures with what its evaluation was measured
            plugins[name] = plugins.get(stage.inputs.get("evaluation", ""), ())
    problems = [
        *resolver.problems,
        *dag.check(stages, loaded.where, resolver.reward_roles),
        *_check_task(loaded, stages),
        *dag.check_gates(stages, loaded.where),
        *(line for name in stages for line in _check_stage(name, stages[name], loaded)),
    ]
    raise_problems(problems)
    # Without files that are named no more, since an override took the place of their plugins.
    files = {n: str(path) for n, path in manager.files.paths.items() if n in manager.files.used}
    values["plugin_files"] = files
    config = RunConfig.model_validate(values | {"stages": stages}, context=stage_classes(manager))
    return ResolvedRun(config, dag.topological_order(config.stages), plugins, loaded)


@dataclass(slots=True)
class _Resolver:
    """Collects problems while it fills in what the plugins say."""

    loaded: LoadedConfig
    manager: PluginManager
    problems: list[str] = field(default_factory=list)
    reward_roles: dict[str, set[str]] = field(default_factory=dict)

    def component(
        self, kind: str, value: Component, loc: Loc, preset: str = "", also: Iterable[str] = ()
    ) -> tuple[dict[str, object], list[PluginUse]]:
        """The component with its plugin's defaults filled in, and the plugin; problems are kept.

        `also` are fields that may stand next to the plugin's and are read elsewhere.
        """
        by = f" (set by algorithm '{preset}')" if preset and not self.loaded.wrote(loc) else ""
        plain: dict[str, object] = value.model_dump(mode="json")
        try:
            entry = self.manager.find(kind, value.name)
            config = self.manager.config(kind, value.name, value.fields())
        except ConfigError as error:
            self.problems.append(self.loaded.problem(loc, f"{error}{by}"))
            return plain, []
        except ValidationError as error:
            owner = f"{kind} '{value.name}'"
            others = [n for n in (*type(value).model_fields, *also) if n != "name"]
            lines = explain(error, self.loaded.where, entry.cls.Config, loc, owner, also=others)
            self.problems += [line + by for line in lines]
            return plain, []
        use = PluginUse(kind, entry.name, entry.package, entry.version, entry.source)
        return plain | config.model_dump(mode="json"), [use]

    def task(self, value: Component) -> tuple[dict[str, object], list[PluginUse]]:
        """The run's task with its fields and those of its parts filled in, and their plugins."""
        filled, used = self.component("task", value, ("task",))
        parts: Any = filled.get("tasks")  # Any: nested YAML values
        for index, part in task_components(filled):
            own, use = self.component("task", part, ("task", "tasks", index), also=SAID_BY_MIXTURE)
            written = parts[index]
            parts[index] = (written if isinstance(written, dict) else {}) | own
            used += use
        return filled, used

    def stage(self, name: str, stage: StageBase) -> tuple[StageBase, list[PluginUse]]:
        """The stage with the plugins that its config names checked and filled in."""
        values: dict[str, Any] = stage.model_dump(mode="json")  # Any: nested YAML values
        used: list[PluginUse] = []
        with faults_of_plugin(name, stage, "components"):
            for path, kind, component in stage.components():
                filled, use = self.component(kind, component, ("stages", name, *path))
                put(values, path, filled)
                used += use
        return type(stage).model_validate(values), used

    def optimizers(self, name: str, stage: StageBase) -> tuple[StageBase, list[PluginUse]]:
        """The stage with its optimizers' own fields checked and filled in, and their plugins."""
        values: dict[str, Any] = stage.model_dump(mode="json")  # Any: nested YAML values
        used: list[PluginUse] = []
        for path, section in optimizers_of(stage):
            loc, plain = ("stages", name, *path), section.model_dump(mode="json")
            component = Component.model_validate({"name": section.name, **section.fields()})
            filled, use = self.component(
                "optimizer", component, loc, also=type(section).model_fields
            )
            put(values, path, plain | filled)
            used += use
            if use and not isinstance(section, OptimizerSection):
                cls = self.manager.find("optimizer", section.name).cls
                self.problems += combinations.check_other_optimizer(cls, loc, self.loaded)
        return (type(stage).model_validate(values) if used else stage), used

    def code_of(self, stage: StageBase) -> list[PluginUse]:
        """The plugin that runs the stage; built-in ones are in posttrain's own digest."""
        if stage.kind in BUILT_IN:
            return []
        entry = self.manager.find("stage", stage.kind)
        return [PluginUse("stage", entry.name, entry.package, entry.version, entry.source)]

    def environment(
        self, name: str, stage: EvaluateStage | RlStage
    ) -> tuple[dict[str, object] | None, list[PluginUse]]:
        """The stage's environment with its fields and its tools' filled in, and their plugins."""
        if stage.environment is None:
            return None, []
        loc = ("stages", name, "environment")
        given = self._with_fields_of_task(stage.environment)
        filled, used = self.component("environment", given, loc)
        tools: Any = filled.get("tools")  # Any: nested YAML values
        for index, tool in tool_components(filled):
            tools[index], use = self.component("tool", tool, (*loc, "tools", index))
            used += use
        return filled, used

    def _with_fields_of_task(self, environment: EnvironmentComponent) -> EnvironmentComponent:
        """The environment; what it does not set is that of a task of the same name."""
        task = self.loaded.config.task
        entries = {entry.name: entry for entry in self.manager.entries("environment")}
        if environment.name != task.name or task.name not in entries:
            return environment
        known = entries[task.name].cls.Config.model_fields
        shared = {field: value for field, value in task.fields().items() if field in known}
        given = {**shared, **environment.model_dump(mode="json")}
        return EnvironmentComponent.model_validate(given)

    def reward_model_stage(
        self, name: str, stage: RewardModelStage
    ) -> tuple[RewardModelStage, list[PluginUse]]:
        before = len(self.problems)
        filled, used = self.stage(name, stage)
        assert isinstance(filled, RewardModelStage)
        if len(self.problems) == before:
            self.problems += preference_checks.check_reward_model(
                name, filled, self.loaded, self.manager
            )
        return filled, used

    def preference_stage(
        self, name: str, stage: PreferenceStage
    ) -> tuple[PreferenceStage, list[PluginUse]]:
        """The stage with its preset expanded, every loss and the data checked."""
        before = len(self.problems)
        expanded = self._expand(name, stage)
        values: dict[str, Any] = expanded.model_dump(mode="json")  # Any: nested YAML values
        used: list[PluginUse] = []
        for path, kind, component in preference_components(expanded):
            loc = ("stages", name, *path)
            filled, use = self.component(kind, component, loc, expanded.algorithm.name)
            put(values, path, filled)
            used += use
        filled_stage = PreferenceStage.model_validate(values)
        if len(self.problems) == before:  # plugins that could not be built cannot be compared
            self.problems += preference_checks.check_preference(
                name, filled_stage, self.loaded, self.manager
            )
        if filled_stage.online is not None and filled_stage.online.ranked_by == "reward_model":
            self.reward_roles.setdefault(name, set()).add("reward_model")
        return filled_stage, used

    def rl_stage(self, name: str) -> tuple[RlStage, list[PluginUse]]:
        """The stage with its preset expanded under what the user wrote, every plugin checked."""
        stage, before = self.loaded.config.stages[name], len(self.problems)
        assert isinstance(stage, RlStage)
        expanded = self._expand(name, stage)
        preset = expanded.algorithm.name
        raw: Any = self.loaded.raw["stages"]  # Any: nested YAML values
        expanded = with_default_correction(expanded, raw[name], self._sampler_lag(expanded))
        values: dict[str, Any] = expanded.model_dump(mode="json")  # Any: nested YAML values
        used: list[PluginUse] = []
        for path, kind, component in rl_components(expanded):
            loc = ("stages", name, *path)
            filled, use = self.component(kind, component, loc, preset)
            needs = getattr(self.manager.find(kind, component.name).cls, "needs", ()) if use else ()
            put(values, path, from_stage(kind, filled, expanded, needs))
            used += use
        values["environment"], use = self.environment(name, expanded)
        used += use
        roles = self.reward_roles.setdefault(name, set())
        for index, reward in enumerate(expanded.rewards):
            loc = ("stages", name, "rewards", index)
            filled, use = self.component("reward", reward, loc, preset)
            whole = RewardComponent.model_validate(from_stage("reward", filled, expanded))
            # Again, if it was right: what the stage fills in may not fit what the user wrote.
            values["rewards"][index] = self.component("reward", whole, loc)[0] if use else filled
            used += use
            if use:
                built = self.manager.build(Reward, reward.name, reward.fields())
                roles |= built.required_inputs()
        if len(self.problems) == before:  # the name of no plugin need not be fit for a label
            own = [self.manager.find("reward", reward.name).cls.name for reward in expanded.rewards]
            for index, label in enumerate(reward_labels(expanded.rewards, own)):
                values["rewards"][index]["label"] = label
        if expanded.critic is not None and expanded.critic.init == "reward_model":
            roles.add("reward_model")
        filled_stage = type(expanded).model_validate(values)
        if len(self.problems) == before:  # plugins that could not be built cannot be compared
            self.problems += combinations.check_rl(name, filled_stage, self.loaded, self.manager)
        return filled_stage, used

    def _sampler_lag(self, stage: RlStage) -> int:
        """How much older than the engine's policy the sampler's groups may be; 0 if it is wrong."""
        try:
            entry = self.manager.find("sampler", stage.sampler.name)
            config = self.manager.config("sampler", entry.name, stage.sampler.fields())
        except (ConfigError, ValidationError):
            return 0  # `component` reports it
        return int(getattr(entry.cls(config), "max_lag")())  # noqa: B009 - the kind's contract

    def _expand(self, name: str, stage: PresetStageT) -> PresetStageT:
        """The stage as its preset sets it, the fields the user wrote on top."""
        loc = ("stages", name, "algorithm")
        try:
            entry = self.manager.find("algorithm", stage.algorithm.name)
            config = self.manager.config("algorithm", entry.name, stage.algorithm.fields())
        except (ConfigError, ValidationError):
            return stage  # `component` reports it
        kind, made_for = stage.kind, str(getattr(entry.cls, "stage"))  # noqa: B009
        if made_for != ("rl" if isinstance(stage, RlStage) else kind):
            reported = (
                f"'{entry.name}' is an algorithm for a stage of kind '{made_for}', not '{kind}'; "
                f"choose another algorithm, or set 'kind: {made_for}'"
            )
            self.problems.append(self.loaded.problem(loc, reported))
            return stage
        expand = getattr(entry.cls(config), "expand")  # noqa: B009 - the contract of the kind
        sets = expand()
        if entry.local:  # it may name plugins in files next to its own
            beside = self.manager.files.paths.get(entry.name.rpartition(":")[0])
            folders = () if beside is None else (beside.parent,)
            sets = self.manager.files.localised(sets, folders)
        stages = self.loaded.raw["stages"]
        assert isinstance(stages, dict)
        if isinstance(stage, RlStage):
            sets = merge_fields(sets, stage.beyond_preset())
        merged = merge_fields(sets, stages[name])
        try:
            return type(stage).model_validate(merged)
        except ValidationError as error:
            title = f"a stage of kind '{kind}' (algorithm '{entry.name}' sets it)"
            prefix = ("stages", name)
            self.problems += explain(error, self.loaded.where, type(stage), prefix, title)
            reported = (
                f"what '{entry.name}' of package {entry.package} sets does not fit this stage"
            )
            self.problems.append(self.loaded.problem(loc, f"{reported}; choose another algorithm"))
            return stage


def _check_task(loaded: LoadedConfig, stages: Mapping[str, StageBase]) -> Iterable[str]:
    """Without a task, stages that need one."""
    if loaded.config.task.name != NO_TASK:
        return
    for name, stage in stages.items():
        if needs := stage.needs_task():
            yield loaded.problem(
                ("stages", name),
                f"a stage of kind '{stage.kind}' needs {needs}, and the config has no `task`; add "
                "one, such as `task: gsm8k` (posttrain plugins list)",
            )


def _check_stage(name: str, stage: StageBase, loaded: LoadedConfig) -> Iterable[str]:
    place = ("stages", name)
    if isinstance(stage, SftStage | RewardModelStage | ProcessRewardModelStage | PreferenceStage):
        yield from combinations.check_optimizer(stage.optimizer, (*place, "optimizer"), loaded)
    if isinstance(stage, RlStage | PreferenceDataStage | TransformStage):
        yield from combinations.check_generation(stage.generation, (*place, "generation"), loaded)
        if not isinstance(stage, PreferenceDataStage) or stage.data is None:  # those that sample
            yield from combinations.check_room(stage.generation, (*place, "generation"), loaded)
    if isinstance(stage, EvaluateStage) and stage.evaluation is not None:
        own = loaded.config.stages[name]
        where = (*place, "evaluation") if getattr(own, "evaluation", None) else ("evaluation",)
        yield from combinations.check_room(stage.evaluation, where, loaded)
        if "reward_model" in stage.inputs and stage.evaluation.num_samples < 2:
            yield loaded.problem(
                (*where, "num_samples"),
                f"the reward model of stages.{name} chooses among sampled answers, and "
                f"{stage.evaluation.num_samples} leaves no choice; set it to 2 or more, or remove "
                f"stages.{name}.inputs.reward_model",
            )
    if isinstance(stage, RlStage) and (stage.evaluate_every or stage.sampled_evaluation):
        yield from combinations.check_room(loaded.config.evaluation, ("evaluation",), loaded)
    if isinstance(stage, RlStage) and stage.sampled_evaluation is not None:
        yield from combinations.check_sampled_evaluation(name, stage.sampled_evaluation, loaded)
    if not isinstance(stage, RlStage):
        return
    if stage.rewards and not stage.teachers and all(r.weight == 0 for r in stage.rewards):
        yield loaded.problem(
            (*place, "rewards"),
            "every reward has weight 0, so nothing can be learned; give at least one a weight "
            "other than 0",
        )
    prompts = stage.prompts_per_step
    if prompts % stage.num_mini_batches:
        fits = [n for n in range(1, min(prompts, 64) + 1) if prompts % n == 0]
        yield loaded.problem(
            (*place, "num_mini_batches"),
            f"{prompts} prompts per step do not divide into {stage.num_mini_batches} mini-batches "
            f"(the responses of a prompt stay together); choose one of {fits}",
        )
    kl = stage.kl
    if kl.place == "reward" and kl.estimator.name != "k1" and not kl.allow_biased_reward_kl:
        yield loaded.problem(
            (*place, "kl"),
            f"estimator '{kl.estimator.name}' in the reward has a biased gradient; use 'estimator: "
            "k1', 'place: loss', or say 'allow_biased_reward_kl: true'",
        )
