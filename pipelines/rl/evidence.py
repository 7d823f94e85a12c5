"""Where the evidence of a stage's steps lies, for the commands that read it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from posttrain.core.analysis.evidence import FOLDER, steps_in, steps_named
from posttrain.core.config.resolve import ResolvedRun
from posttrain.core.config.rl_stage import RL_KINDS, TRAINING_KINDS
from posttrain.core.errors import ConfigError, ResourceError, nearest
from posttrain.core.store.artifacts import ArtifactStore
from posttrain.core.store.manifests import read_manifest
from posttrain.core.store.run_record import RunRecord
from posttrain.pipelines.stage.files import checkpoint_folder


@dataclass(frozen=True, slots=True)
class EvidenceFolder:
    """Where the evidence of a stage lies, and of which steps there is some."""

    stage: str
    folder: Path
    steps: tuple[int, ...]


def find_evidence(
    run: RunRecord,
    resolved: ResolvedRun,
    stage: str | None,
    home: Path,
    store: ArtifactStore,
    given_too: bool = False,
) -> EvidenceFolder:
    """The evidence of the run's stage `stage`, or of the only one that can be meant.

    That is a stage that samples (kinds `rl` and `distill`), with `given_too` also one that learns
    from given answers. Raises `ConfigError` for any other stage, and `ResourceError` where nothing
    was kept. A stage that still runs, or was interrupted, is looked up too.
    """
    kinds = {name: resolved.config.stages[name].kind for name in resolved.order}
    rl = [name for name, kind in kinds.items() if kind in RL_KINDS]
    able = [name for name, kind in kinds.items() if kind in TRAINING_KINDS] if given_too else rl
    if stage is not None and stage not in able:
        what = f"is of kind '{kinds[stage]}'" if stage in kinds else "is none of this run's"
        if given_too:
            raise ConfigError(
                f"stage '{stage}' {what}{nearest(stage, able)}; steps of the stages that train can "
                f"be looked at: {able}"
            )
        raise ConfigError(
            f"stage '{stage}' {what}{nearest(stage, rl)}; steps of its stages of kind rl or "
            f"distill can be compared: {rl} (`posttrain inspect RUN --stage NAME --step N` shows a "
            "step of every stage that trains, `posttrain compare RUN RUN --stage NAME` its curves)"
        )
    meant = rl if len(rl) == 1 else able
    if stage is None and len(meant) != 1:
        kind = "that train" if given_too else "of kind rl or distill"
        raise ConfigError(
            f"of the stages {kind} this run has {len(meant)}"
            + (f": {meant}; name one with --stage" if meant else ": there are no steps to look at")
        )
    name = stage or meant[0]
    identity = run.stages.get(name)
    if identity is None:
        raise ResourceError(
            f"stage '{name}' never began in run {run.run_id[:12]}; the same `posttrain run` "
            "command goes on with the run"
        )
    folder = store.fetched(name, identity)
    manifest = read_manifest(folder)
    if manifest is None:  # not done, or taken away
        folder = checkpoint_folder(home, name, identity)
    folder = folder / FOLDER
    # Steps whose files are gone too: a summary of the others would not be one of the run.
    written = [Path(file) for file in (manifest or {"files": ()})["files"]]
    written = [file for file in written if file.parent == Path(FOLDER)]
    steps = tuple(sorted({*steps_in(folder), *steps_named(written)}))
    if not steps:
        raise ResourceError(
            f"there is no evidence of the steps of stage '{name}' in {folder}: keep.evidence_mb is "
            f"{resolved.config.keep.evidence_mb} in this run's config (0 keeps none); compute the "
            "stage again with --no-cache --set keep.evidence_mb=256"
        )
    return EvidenceFolder(name, folder, steps)
