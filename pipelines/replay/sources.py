"""What a replay is made of, found in the home and the store: read, never written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from posttrain.core.artifacts import Artifact, ArtifactStore, file_digest, read_manifest
from posttrain.core.config.base import BASE_MODEL, StageBase
from posttrain.core.config.dag import makes, stage_kind
from posttrain.core.config.resolve import ResolvedRun
from posttrain.core.errors import ConfigError, ResourceError, nearest
from posttrain.core.models.source import obtain
from posttrain.core.run_record import RunRecord
from posttrain.core.training.checkpoint import DamagedCheckpoint, check_whole
from posttrain.core.training.retention import starting_points, step_of
from posttrain.core.training.step_record import FOLDER, STEPS, StepRecord, read_record
from posttrain.pipelines.stage_files import checkpoint_folder

TRAINING = ("rl", "sft", "reward_model", "preference")
_SHOWN = 12


@dataclass(frozen=True, slots=True)
class StepSource:
    """The record of a stage's steps. `result` is its finished folder, None while it is not done."""

    stage: str
    identity: str
    folder: Path
    recorded: Mapping[int, StepRecord]
    checkpoints: Path
    result: Path | None


def choose_stage(resolved: ResolvedRun, wanted: str | None) -> str:
    """The stage to replay: the one named, or the only one that can be meant."""
    stages = resolved.config.stages
    able = {name: stage_kind(stages[name]) for name in resolved.order}
    able = {name: kind for name, kind in able.items() if kind in TRAINING}
    if wanted is not None:
        if wanted not in stages:
            raise ConfigError(
                f"this run has no stage '{wanted}'{nearest(wanted, stages)} (that can be replayed: "
                f"{list(able)})"
            )
        if wanted not in able:
            raise ConfigError(
                f"stage '{wanted}' takes no optimizer steps, so there is none to replay; choose "
                f"one of {list(able)}"
            )
        return wanted
    rl = [name for name, kind in able.items() if kind == "rl"]
    meant = rl or list(able)
    if len(meant) != 1:
        what = f"several: {meant}; name one with --stage" if meant else "none"
        raise ConfigError(f"of the stages that take optimizer steps this run has {what}")
    return meant[0]


def find_steps(
    run: RunRecord, resolved: ResolvedRun, stage: str, home: Path, store: ArtifactStore
) -> StepSource:
    """Where the stage's steps were recorded; raises `ResourceError` when they were not."""
    identity = run.stages.get(stage)
    if identity is None:
        raise ResourceError(
            f"stage '{stage}' never began in run {run.run_id[:12]}; the same `posttrain run` "
            "command goes on with the run"
        )
    result: Path | None = store.folder(stage, identity)
    assert result is not None
    checkpoints = checkpoint_folder(home, stage, identity)
    folder = result / FOLDER
    if read_manifest(result) is None:  # not done, or taken away
        result, folder = None, checkpoints / FOLDER
    recorded = read_record(folder)
    if not recorded:
        every = resolved.config.keep.records
        raise ResourceError(
            f"no step of stage '{stage}' of this run can be replayed: none was recorded"
            + (f" ({folder / STEPS} is not there)" if every else " (keep.records was 0)")
            + "; run the config again with --no-cache --set keep.records=1"
        )
    return StepSource(stage, identity, folder, recorded, checkpoints, result)


def check_step(source: StepSource, step: int, every: int) -> None:
    """Raise unless `step` was recorded, saying which steps were and what to set for it."""
    if step in source.recorded:
        return
    known = sorted(source.recorded)
    shown = ", ".join(map(str, known[:_SHOWN])) + (", ..." if len(known) > _SHOWN else "")
    if not 1 <= step <= known[-1]:
        raise ConfigError(
            f"--step {step}: stage '{source.stage}' of this run has recorded steps {shown}"
            + (f" to {known[-1]}" if len(known) > _SHOWN else "")
        )
    raise ResourceError(
        f"step {step} of stage '{source.stage}' cannot be replayed: it was not recorded "
        f"(keep.records was {every}). Of this run can be: {shown}. To record it, run the config "
        "with --no-cache --set keep.records=1"
    )


def is_unchanged(source: StepSource) -> bool:
    """Whether the record is what the stage wrote; of a stage that is not done nothing is known."""
    manifest = None if source.result is None else read_manifest(source.result)
    if manifest is None:
        return True
    known = manifest["files"].get(f"{FOLDER}/{STEPS}")
    return bool(known == file_digest(source.folder / STEPS))


def starting_point(source: StepSource, step: int, warn: Callable[[str], None]) -> Path | None:
    """The newest whole checkpoint before `step`; None: the stage's input is what it starts from."""
    for folder in starting_points(source.checkpoints):
        if step_of(folder) >= step:
            continue
        try:
            check_whole(folder)
        except DamagedCheckpoint as error:
            warn(f"{str(error).partition(':')[0]}: it is passed over")
            continue
        return folder
    return None


def find_inputs(
    run: RunRecord, resolved: ResolvedRun, stage: StageBase, home: Path, store: ArtifactStore
) -> dict[str, Artifact]:
    """The artifacts that the stage read; raises `ResourceError` when one is gone or damaged."""
    found = {}
    for role, source in stage.inputs.items():
        if source == BASE_MODEL:
            base = obtain(resolved.config.model, home / "models")
            found[role] = Artifact("model", str(base.path), base.digest, BASE_MODEL)
            continue
        result, reason = store.lookup(source, run.stages.get(source, ""))
        if result is None:
            raise ResourceError(
                f"the stage reads what stage '{source}' made, which is not in {store.root} any "
                f"more ({reason}): the `posttrain run` command of this run makes it again"
            )
        found[role] = result.artifact(makes(resolved.config.stages[source]))
    return found


def changed_inputs(source: StepSource, inputs: Mapping[str, Artifact]) -> list[str]:
    """Roles whose artifact is not the one that the stage read."""
    manifest = None if source.result is None else read_manifest(source.result)
    parts = {} if manifest is None else manifest["parts"]
    known = {role: parts.get(f"input {role}", item.digest) for role, item in inputs.items()}
    return [role for role, item in inputs.items() if known[role] != item.digest]
