"""What a run begins with: its folders, its config, and a check of model, engine and data.

Nothing here writes, and importing it loads nothing heavy.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from posttrain.core.errors import ConfigError, ResourceError, shortlist
from posttrain.core.store import urls
from posttrain.pipelines.run.environment_checks import check_environments, check_samplers

if TYPE_CHECKING:
    from posttrain.core.config.base import StageBase
    from posttrain.core.config.resolve import ResolvedRun
    from posttrain.core.config.rl_stage import RewardComponent
    from posttrain.core.contracts import Plugin, Task
    from posttrain.core.plugin_manager import PluginManager
    from posttrain.core.types import Problem, Split


HOME_VARIABLE = "POSTTRAIN_HOME"
STORE_VARIABLE = "POSTTRAIN_STORE"
DEFAULT_HOME = Path(".posttrain")
SPLITS: tuple[Split, Split] = ("train", "held_out")
ADDRESS_VARIABLES = (
    "PREFECT_API_URL",
    "MLFLOW_TRACKING_URI",
    "HF_ENDPOINT",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
)
"""Variables that libraries read addresses from, each with an error of its own or at a later time.

PREFECT_API_URL is always that of a server; the others may be a folder, or a host without `http`.
"""


def default_home() -> Path:
    """The home that the environment names, or the one in this folder."""
    return Path(os.environ.get(HOME_VARIABLE) or DEFAULT_HOME)


def shared_store() -> str | None:
    """The store that the environment names, for runs that no command line starts."""
    return os.environ.get(STORE_VARIABLE) or None


def folders(home: Path, store: str | Path | None) -> tuple[Path, Path]:
    """Home and store as absolute paths; the store is the home's own unless another is named.

    Of a store with a URL it is the folder of this machine that stages are fetched into. Every
    command begins here: raises `ConfigError` as `check_addresses` does.
    """
    check_addresses()
    home = home.expanduser().resolve()
    if store is None:
        return home, home / "artifacts"
    if urls.is_url(str(store)):
        return home, urls.cached(str(store))
    return home, Path(store).expanduser().resolve()


def check_addresses() -> None:
    """Raise `ConfigError` for a variable whose address no library can read."""
    for variable in ADDRESS_VARIABLES:
        for name in (variable, variable.lower()):
            value = os.environ.get(name, "")
            if value and not _is_address(value, server=variable == "PREFECT_API_URL"):
                raise ConfigError(
                    f"{name} is '{value}', which is not an address: correct it, for instance "
                    "http://HOST:PORT, or unset it"
                )


def _is_address(text: str, *, server: bool) -> bool:
    try:
        parts = urlsplit(text)
        parts.port  # noqa: B018 - it is read here
    except ValueError:
        return False
    http = parts.scheme in ("http", "https")
    return bool(parts.hostname) if http else not server


def resolve_configs(
    configs: Sequence[Path | Mapping[str, object]],
    overrides: Sequence[str] | None,
    plugins: Sequence[type[Plugin[Any]]] = (),
) -> tuple[ResolvedRun, PluginManager]:
    """Load and resolve; YAML mistakes show before the slow import of the plugins.

    `plugins` are offered in addition to those that are installed.
    """
    from posttrain.core.config.loading import load_config
    from posttrain.core.config.resolve import resolve

    loaded = load_config(configs, overrides or [])
    from posttrain.core.data.preference_checks import check_files
    from posttrain.core.plugin_manager import PluginManager

    manager = PluginManager()
    for plugin in plugins:
        manager.add(plugin)
    resolved = resolve(loaded, manager)
    with loaded.located():
        notes = (*resolved.notes, *check_files(resolved, manager))
    return replace(resolved, notes=notes), manager


@dataclass(frozen=True, slots=True)
class Inputs:
    """The task, and one problem of each split, as proof that it can supply them."""

    task: Task[Any]
    problems: dict[str, Problem]
    notes: tuple[str, ...] = ()
    """What was not checked, and what is probably a mistake."""


def check_inputs(resolved: ResolvedRun, manager: PluginManager) -> Inputs:
    """Model source, engine and task can be used.

    Raises `ResourceError` for a model directory without weights, an engine that cannot run here or
    a package that an optimizer needs, and `DataError` for missing, empty or malformed data.
    """
    with resolved.loaded.located():
        return _check_inputs(resolved, manager)


def _check_inputs(resolved: ResolvedRun, manager: PluginManager) -> Inputs:
    from posttrain.core.config.base import NO_TASK
    from posttrain.core.contracts import RolloutEngine
    from posttrain.core.models.device import ModelRuntime
    from posttrain.core.models.source import check_source, unchecked

    config = resolved.config
    check_source(config.model)
    ModelRuntime.from_config(config.model)
    check_training(resolved, manager)
    check_environments(resolved, manager)
    check_samplers(resolved, manager)
    check_adapters(resolved)
    if not isinstance(config.engine, str):
        engine = manager.find("rollout_engine", config.engine.name).cls
        assert issubclass(engine, RolloutEngine)
        reason = engine.unavailable_reason()
        if reason is not None:
            raise ResourceError(f"engine '{config.engine.name}' cannot run here: {reason}")
    task: Task[Any] = manager.task(config.task)
    problems: dict[str, Problem] = {}
    if task.name != NO_TASK:
        problems = {split: task.problems(split, 1, config.seed)[0] for split in SPLITS}
    check_examples(resolved, task, problems.get("train"))
    unjudged = check_answers(resolved, manager, task)
    own = [*check_pools(resolved, manager), *check_stages(resolved, manager, task)]
    known = (unchecked(config.model), unjudged, *task.notes())
    notes = (*filter(None, known), *own, *resolved.notes)
    return Inputs(task, problems, notes)


@dataclass(frozen=True, slots=True)
class Setting:
    """What a stage's own check may look at (`StageSetting`)."""

    name: str
    seed: int
    task: Task[Any]
    max_model_len: int


def check_stages(resolved: ResolvedRun, manager: PluginManager, task: Task[Any]) -> list[str]:
    """The checks that stage kinds bring themselves; returns their warnings."""
    from posttrain.core.contracts.stage import faults_of_plugin  # it loads pydantic

    config, found = resolved.config, []
    for name, stage in config.stages.items():
        setting = Setting(name, config.seed, task, config.model.max_model_len)
        with faults_of_plugin(name, stage, "check"):
            warnings = manager.stage(stage).check(setting) or ()
            if isinstance(warnings, str):
                warnings = (warnings,)
            found += [f"stages.{name}: {warning}" for warning in warnings]
    return found


# Weights (bytes) that are loaded to check what a model computes; larger ones are checked at load.
MOST_CHECKED = 2 * 2**30


def check_model(resolved: ResolvedRun, manager: PluginManager) -> list[str]:
    """Compare our passes with the model's own forward pass, where its directory is here.

    Returns what is computed in a slower way and why, and that a model was not checked. Raises
    `ResourceError` for a model that cannot be used.
    """
    config = resolved.config
    path = Path(config.model.source).expanduser()
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    if not path.is_dir():
        return []
    if size > MOST_CHECKED:
        return [f"model {config.model.source} is checked when the run loads it: it is large"]
    from posttrain.core.models.device import ModelRuntime
    from posttrain.core.models.loading import load_policy
    from posttrain.core.models.paths import paths_of
    from posttrain.core.models.quiet import quiet_libraries
    from posttrain.core.training.forward import check_passes
    from posttrain.pipelines.stage.engines import EnginePool

    quiet_libraries()
    runtime = ModelRuntime.from_config(config.model)
    model = load_policy(path, runtime)
    check_passes(model)
    notes = list(paths_of(model).notes)
    del model
    pool = EnginePool(config, manager, runtime)
    if pool.name == "transformers":
        with pool.lease(path) as engine:
            notes += paths_of(getattr(engine, "model", None)).notes
        pool.close()
    return notes


def check_examples(resolved: ResolvedRun, task: Task[Any], problem: Problem | None) -> None:
    """Worked answers for stages that imitate them, pairs that the task brings, the texts of
    `ptx.path`, and keys of judges."""
    from posttrain.core.config.base import TASK_DATA
    from posttrain.core.config.preference_stages import PreferenceDataStage, ProcessRewardModelStage
    from posttrain.core.config.rl_stage import RlStage
    from posttrain.core.config.sft_stage import SftStage
    from posttrain.core.data.formats import examples
    from posttrain.core.data.problem_sets import check_worked, read_examples
    from posttrain.core.data.rows import data_rows
    from posttrain.core.data.steps import read_labelled_steps
    from posttrain.core.rewards.judge import api_key

    for name, stage in resolved.config.stages.items():
        if isinstance(stage, SftStage) and stage.data is not None:
            for source in stage.data:
                for _ in examples(data_rows(source.path, f"stages.{name}.data")):
                    pass
        elif problem and needs_worked(stage) and "dataset" not in stage.inputs:
            check_worked(task, [problem])
        if isinstance(stage, SftStage) and stage.held_out is not None:
            for _ in examples(data_rows(stage.held_out, f"stages.{name}.held_out")):
                pass
        if isinstance(stage, PreferenceDataStage) and stage.data == TASK_DATA:
            task.preferences()
        if isinstance(stage, ProcessRewardModelStage) and stage.data is not None:
            read_labelled_steps(stage.data, f"stages.{name}.data", stage.separator)
        if isinstance(stage, RlStage) and stage.ptx.path is not None:
            read_examples(stage.ptx.path, f"stages.{name}.ptx.path")
        for reward in stage.rewards if isinstance(stage, RlStage) else ():
            key = reward.fields().get("api_key_env")
            api_key(None if key is None else str(key))


def needs_worked(stage: StageBase) -> bool:
    """Whether a stage learns from, or records, the data's worked answers."""
    from posttrain.core.config.distill_stage import RecordTeacherStage
    from posttrain.core.config.rl_stage import RlStage
    from posttrain.core.config.sft_stage import SftStage

    if isinstance(stage, RlStage):
        return stage.on_policy_share < 1 and not stage.seq_kd and not stage.learns_from_record
    if isinstance(stage, RecordTeacherStage):
        return stage.answers == "worked"
    return isinstance(stage, SftStage)


def check_answers(resolved: ResolvedRun, manager: PluginManager, task: Task[Any]) -> str:
    """Refuse what needs answers where the data have none: rewards, and pairs that the verifier
    makes; returns a note on accuracies."""
    from posttrain.core.config.preference_stages import (
        PreferenceDataStage,
        PreferenceStage,
        ProcessRewardModelStage,
    )
    from posttrain.core.config.rl_stage import RlStage
    from posttrain.core.contracts import Reward, Sampler

    where, labels = task.unjudged(), list(task.parts())
    for name, stage in resolved.config.stages.items():
        if isinstance(stage, RlStage):
            check_reward_tasks(f"stages.{name}", stage.rewards, labels)
    if not where:
        return ""
    for name, stage in resolved.config.stages.items():
        for index, reward in enumerate(stage.rewards if isinstance(stage, RlStage) else ()):
            cls = manager.find("reward", reward.name).cls
            place = task.unjudged(reward.tasks or ())
            if place and issubclass(cls, Reward) and cls.needs_answer:
                by_task = "; name the tasks that have answers as its `tasks`" if labels else ""
                raise ConfigError(
                    f"stages.{name}.rewards.{index}: '{reward.name}' compares with the problem's "
                    f"answer, and {place} has none that a verifier reads; add answers (task."
                    "answer_field), set task.match or task.verifiers, or use rewards that need no "
                    f"answer, such as llm_judge, reward_model, format or code_tests{by_task}"
                )
        if isinstance(stage, RlStage):
            sampler = manager.find("sampler", stage.sampler.name).cls
            if issubclass(sampler, Sampler) and sampler.needs_verdicts:
                raise ConfigError(
                    f"stages.{name}.sampler: '{sampler.name}' chooses by how many answers are "
                    f"right, and {where} has no answer that a verifier reads; add answers, or set "
                    "sampler: group"
                )
        online = stage.online if isinstance(stage, PreferenceStage) else None
        by_verifier = online is None or online.ranked_by == "verifier"
        if isinstance(stage, PreferenceDataStage) and stage.data is None and by_verifier:
            raise ConfigError(
                f"stages.{name}: right answers of the model are paired with wrong ones, but "
                f"{where} has no answer that a verifier reads; add answers (task.answer_field), "
                "name a file of preferences as `data`, or rank by a model (online.ranked_by: "
                "reward_model)"
            )
        if isinstance(stage, ProcessRewardModelStage) and stage.data is None:
            raise ConfigError(
                f"stages.{name}: a step's value is the share of right answers after it, but "
                f"{where} has no answer that a verifier reads; add answers (task.answer_field), or "
                "name a file of labelled steps as `data`"
            )
    return f"{where} has no answer that a verifier reads: accuracies count such problems as wrong"


def check_reward_tasks(
    where: str, rewards: Sequence[RewardComponent], labels: Sequence[str]
) -> None:
    """Refuse rewards of tasks that there are not, and tasks whose answers no reward scores.

    `labels` are those of the mixture's tasks; none where there is one task.
    """
    for index, reward in enumerate(rewards):
        unknown = [label for label in reward.tasks or () if label not in labels]
        if unknown:
            there = shortlist(unknown[0], labels) if labels else "the task is not a mixture"
            raise ConfigError(
                f"{where}.rewards.{index}.tasks: no task of the mixture is called '{unknown[0]}' "
                f"({there}); name labels of its tasks, or remove `tasks`"
            )
    for label in labels if any(reward.tasks for reward in rewards) else ():
        if not any(r.weight and (r.tasks is None or label in r.tasks) for r in rewards):
            raise ConfigError(
                f"{where}.rewards: none scores answers to problems of task '{label}', so they "
                f"would be sampled and teach nothing; add '{label}' to the `tasks` of one, or take "
                "the task out of the mixture"
            )


def check_pools(resolved: ResolvedRun, manager: PluginManager) -> list[str]:
    """The pools on nodes that a cluster is asked for have something to do; returns notes."""
    from posttrain.core.config.presets import tool_components
    from posttrain.core.config.rl_stage import RlStage
    from posttrain.core.contracts import Environment, Reward, Tool

    config = resolved.config
    cluster, stages = config.cluster, config.stages.values()
    if cluster is None:
        return []
    if cluster.rewards is not None:
        scored = [r for stage in stages if isinstance(stage, RlStage) for r in stage.rewards]
        found = {reward.name: manager.find("reward", reward.name).cls for reward in scored}
        if not any(issubclass(c, Reward) and c.runs_in == "worker" for c in found.values()):
            here = f" ({', '.join(found)} run in the run's process)" if found else ""
            raise ConfigError(
                f"cluster.rewards: no reward of this run is scored in workers{here}, so nodes "
                "would have nothing to score; remove the section"
            )
    notes = []
    if cluster.environments is not None:
        components = [getattr(stage, "environment", None) for stage in stages]
        environments = [component for component in components if component is not None]
        if not environments:
            raise ConfigError(
                "cluster.environments: no stage of this run has an environment; remove the "
                "section, or add `environment` to a stage"
            )
        wanted = cluster.environments.at_once or 1
        for component in environments:
            uses = [("environment", component.name)]
            uses += [("tool", tool.name) for _, tool in tool_components(component.fields())]
            for kind, name in uses:
                cls = manager.find(kind, name).cls
                assert issubclass(cls, Environment | Tool)
                if cls.at_once < wanted:
                    notes.append(
                        f"cluster.environments.at_once is {wanted}, but {kind} '{name}' takes "
                        f"{cls.at_once} at a time on each node: set at_once of its class if it may "
                        "be called from several threads"
                    )
    return list(dict.fromkeys(notes))


def _holders(name: str, stage: StageBase) -> list[tuple[str, object]]:
    """(place, section) of all that a stage trains."""
    parts = [(f"{name}.{part}", getattr(stage, part, None)) for part in ("critic", "implicit_prm")]
    return [(name, stage), *parts]


def check_training(resolved: ResolvedRun, manager: PluginManager) -> None:
    """Packages and precisions that optimizers need."""
    import torch

    from posttrain.core.config.sections import OptimizerSection
    from posttrain.core.contracts import Optimizer
    from posttrain.core.models.device import choose_dtype

    model = resolved.config.model
    for name, stage in resolved.config.stages.items():
        for place, holder in _holders(name, stage):
            section = getattr(holder, "optimizer", None)
            if section is None:
                continue
            reason = manager.build(Optimizer, section.name, section.fields()).missing()
            if reason:
                raise ResourceError(f"stages.{place}: {reason}")
            stochastic = isinstance(section, OptimizerSection) and section.rounding == "stochastic"
            if stochastic and choose_dtype(model) != torch.bfloat16:
                raise ConfigError(
                    f"stages.{place}.optimizer.rounding: stochastic is for bfloat16 weights, and "
                    f"model.dtype '{model.dtype}' is float32 on this machine; set model.dtype: "
                    "bfloat16, or rounding: masters"
                )


def check_adapters(resolved: ResolvedRun) -> None:
    """The layers that adapters name are those of the base model, where it is on this disk."""
    config = resolved.config
    wanted = {}
    for name, stage in config.stages.items():
        for place, holder in _holders(name, stage):
            if (section := getattr(holder, "lora", None)) is not None:
                wanted[place] = section
    from posttrain.core.models.source import known_config

    found = known_config(config.model) if wanted else None
    if found is None:
        return
    from posttrain.core.models.lora import check_targets  # late: with it comes transformers

    for place, section in wanted.items():
        check_targets(None if found == "bundled" else found, section, f"stages.{place}.lora")
