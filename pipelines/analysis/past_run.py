"""A run of the home, opened for reading: config, stages, inputs, evidence, checkpoints."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.core.analysis.evidence import (
    FOLDER,
    StepEvidence,
    read_step,
    step_files,
)
from posttrain.core.analysis.report import listed
from posttrain.core.config.dag import topological_order
from posttrain.core.config.loading import LoadedConfig, load_config, validated
from posttrain.core.config.resolve import ResolvedRun, resolve
from posttrain.core.config.rl_stage import RL_KINDS, TRAINING_KINDS, RewardComponent, RlStage
from posttrain.core.config.schema import BUILT_IN
from posttrain.core.config.spec import Spec
from posttrain.core.contracts import Reward, Task
from posttrain.core.errors import ConfigError, ResourceError, RunError, nearest
from posttrain.core.models.device import ModelRuntime
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.store.artifacts import Artifact, ArtifactStore
from posttrain.core.store.manifests import file_digest, read_manifest
from posttrain.core.store.run_record import RunRecord, find_run
from posttrain.core.training.checkpoint import (
    DamagedCheckpoint,
    check_whole,
    starting_points,
    step_of,
)
from posttrain.pipelines.rl.evidence import EvidenceFolder, find_evidence
from posttrain.pipelines.run.checks import resolve_configs
from posttrain.pipelines.run.past_inputs import inputs_read
from posttrain.pipelines.stage.files import checkpoint_folder
from posttrain.pipelines.stage.inputs import StageInputs


@dataclass(frozen=True, slots=True)
class PastRun:
    """A run and its folders; nothing of it is ever written."""

    record: RunRecord
    resolved: ResolvedRun
    manager: PluginManager
    home: Path
    store: ArtifactStore

    @property
    def short_id(self) -> str:
        """Enough of its id to distinguish it."""
        return self.record.run_id[:12]

    def evidence(self, stage: str | None, *, given_too: bool = False) -> EvidenceFolder:
        """The evidence of `stage`, or of the only one that can be meant; as `find_evidence`."""
        return find_evidence(
            self.record, self.resolved, stage, self.home, self.store, given_too=given_too
        )

    def rl_stage(self, name: str) -> RlStage:
        """The config of a stage of kind rl."""
        stage = self.resolved.config.stages[name]
        assert isinstance(stage, RlStage), "find_evidence has refused other kinds"
        return stage

    def component(self, spec: Spec) -> dict[str, object]:
        """A plugin named on the command line, as `with_stage` takes it.

        A file is one of the working directory, where it has one of that name, else the run's copy.
        """
        return spec.component() | {"name": self.manager.local_name(spec.name)}

    def with_stage(self, name: str, values: Mapping[str, Any]) -> ResolvedRun:  # Any: YAML values
        """The config resolved again with other `values` for an rl stage; raises `ConfigError`.

        Inputs that only what was replaced has read are left out: a config with them is refused.
        """
        loaded = self.resolved.loaded
        raw: dict[str, Any] = copy.deepcopy(loaded.raw)  # Any: nested YAML values
        needed = self._roles(values)
        inputs = {role: source for role, source in values["inputs"].items() if role in needed}
        raw["stages"][name] = {**values, "inputs": inputs}
        config = validated(raw, loaded.where, self.manager)
        return resolve(LoadedConfig(config, raw, loaded.files, loaded.marks), self.manager)

    def _roles(self, values: Mapping[str, Any]) -> set[str]:  # Any: YAML values
        """The inputs that a stage of these values reads."""
        roles = {"model", "dataset"}
        if (values.get("critic") or {}).get("init") == "reward_model":
            roles.add("reward_model")
        teachers = values.get("teachers") or {}
        roles |= {name for name, teacher in teachers.items() if teacher.get("model") is None}
        for reward in values["rewards"]:
            component = RewardComponent.model_validate(reward)
            built = self.manager.build(Reward, component.name, component.fields())
            roles |= built.required_inputs()
        return roles

    def raw_stage(self, name: str) -> dict[str, Any]:  # Any: nested YAML values
        """The stage as the run's complete config has it, free to be changed."""
        stages: Any = self.resolved.loaded.raw["stages"]  # Any: nested YAML values
        found: dict[str, Any] = copy.deepcopy(stages[name])
        return found

    def training_stage(self, wanted: str | None) -> str:
        """The stage named, or the only one that can be meant, of those with optimizer steps."""
        stages = self.resolved.config.stages
        able = {name: stages[name].kind for name in self.resolved.order}
        able = {name: kind for name, kind in able.items() if kind in TRAINING_KINDS}
        if wanted is not None:
            if wanted in able:
                return wanted
            if wanted in stages and stages[wanted].kind not in BUILT_IN:
                raise ConfigError(
                    f"stage '{wanted}' is of the plugin kind '{stages[wanted].kind}', whose steps "
                    f"are not recorded, so there is none to replay; choose one of {list(able)}"
                )
            if wanted in stages:
                raise ConfigError(
                    f"stage '{wanted}' takes no optimizer steps, so there is none to replay; "
                    f"choose one of {list(able)}"
                )
            raise ConfigError(
                f"this run has no stage '{wanted}'{nearest(wanted, stages)} (that can be replayed: "
                f"{list(able)})"
            )
        meant = [name for name, kind in able.items() if kind in RL_KINDS] or list(able)
        if len(meant) != 1:
            what = f"several: {meant}; name one with --stage" if meant else "none"
            raise ConfigError(f"of the stages that take optimizer steps this run has {what}")
        return meant[0]

    def identity(self, stage: str) -> str:
        """The identity of a stage that began; raises `ResourceError` where it did not."""
        found = self.record.stages.get(stage)
        if found is None:
            raise ResourceError(
                f"stage '{stage}' never began in run {self.short_id}; the same `posttrain run` "
                "command goes on with the run"
            )
        return found

    def inputs(self, stage: str) -> dict[str, Artifact]:
        """What the stage read; raises `ResourceError` where some of it is gone or damaged."""
        return inputs_read(self.resolved.config, self.record, stage, self.home, self.store)

    def checkpoints(
        self, stage: str, before: float = math.inf, warn: Callable[[str], object] = str
    ) -> Iterator[tuple[int, Path]]:
        """Whole checkpoints after steps below `before`, newest first; `warn` of damaged ones."""
        for folder in starting_points(checkpoint_folder(self.home, stage, self.identity(stage))):
            step = step_of(folder)
            if step >= before:
                continue
            try:
                check_whole(folder)
            except DamagedCheckpoint as error:
                warn(f"{str(error).partition(':')[0]}: it is passed over")
                continue
            yield step, folder

    def stage_inputs(
        self, name: str, resolved: ResolvedRun, inputs: Mapping[str, Artifact]
    ) -> StageInputs:
        """What plugins and models of stage `name` are built from, by the config `resolved`."""
        return inputs_of(name, resolved, self.manager, inputs)


def inputs_of(
    name: str, resolved: ResolvedRun, manager: PluginManager, inputs: Mapping[str, Artifact]
) -> StageInputs:
    """What plugins and models of a stage are built from, outside a run."""
    config = resolved.config
    task: Task[Any] = manager.task(config.task)
    return StageInputs(
        run=config,
        name=name,
        stage=config.stages[name],
        inputs=inputs,
        manager=manager,
        task=task,
        runtime=ModelRuntime.from_config(config.model),
        check=lambda: None,
    )


def open_run(run: str, home: Path, store: Path, *, compare: bool = True) -> PastRun:
    """The run whose id begins with `run`, its config resolved.

    Without `compare` a config that was changed is taken as it is: who compares it says so.
    """
    found = find_run(home, run)
    config = found.unchanged_config() if compare else found.config
    resolved, manager = resolve_configs([config], None)
    return PastRun(found, resolved, manager, home, ArtifactStore(store))


def open_record(run: str, home: Path, store: Path) -> PastRun:
    """The run whose id begins with `run`, as its complete config says, without its plugins.

    For what reads what the run left and computes nothing with it.
    """
    found = find_run(home, run)
    loaded = load_config([found.unchanged_config()], [])
    resolved = ResolvedRun(loaded.config, topological_order(loaded.config.stages), {}, loaded)
    manager = PluginManager(load_entry_points=False)
    return PastRun(found, resolved, manager, home, ArtifactStore(store))


def read_steps(found: EvidenceFolder, step: int | None) -> Iterator[StepEvidence]:
    """The step asked for, or all that were kept, one after another."""
    for number in found.steps if step is None else (step,):
        yield read_unchanged(found, number)


def read_unchanged(found: EvidenceFolder, step: int) -> StepEvidence:
    """The evidence of a step, if its files are those that the stage wrote; else `RunError`.

    Of a stage that is not done no digests are known, so its files are taken as they are. Raises
    `ConfigError` as `check_step`.
    """
    check_step(found, step)
    manifest = read_manifest(found.folder.parent)
    known = {} if manifest is None else manifest["files"]
    for path in step_files(found.folder, step):
        wanted = known.get(f"{FOLDER}/{path.name}")
        if wanted is not None and (not path.is_file() or file_digest(path) != wanted):
            raise RunError(
                f"the evidence of step {step} was changed after the run: {path} is not what the "
                "stage wrote; compute the stage again with --no-cache"
            )
    return read_step(found.folder, step)


def require_logprobs(evidence: StepEvidence) -> None:
    """Raise `ConfigError` for the evidence of an import without log-probs."""
    batch = evidence.batch
    if batch.old_logprobs is None and not bool(batch.rollout_logprobs.isfinite().any()):
        raise ConfigError(
            f"the log-probs of step {evidence.step} are not known, since the dump was imported "
            "with --no-logprobs: import it again without that option"
        )


def check_step(found: EvidenceFolder, step: int) -> None:
    """Raise `ConfigError` unless there is evidence of `step`, naming the steps there are."""
    if step not in found.steps:
        raise ConfigError(
            f"--step {step}: of stage '{found.stage}' of this run there is evidence of the steps "
            f"{listed(found.steps)}; choose one of them (keep.evidence_mb bounds how many a run "
            "keeps)"
        )
