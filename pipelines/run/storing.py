"""What a stage made, put into the store: digested, linked in MLflow, moved to its final place."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from posttrain.core.config.base import StageBase
from posttrain.core.contracts import StageOutput
from posttrain.core.errors import RunError
from posttrain.core.store.artifacts import Artifact, ArtifactStore, StageResult
from posttrain.core.store.manifests import digests_below, model_digest, tree_digests
from posttrain.core.tracking.mlflow_stage import StageTracker
from posttrain.pipelines.stage.files import StageFiles
from posttrain.pipelines.stage.inputs import PROBLEMS_FILE

MODELS = ("model", "reward_model")
"""Kinds of artifacts that MLflow has an entry of."""

HOLDS = {"model": "config.json", "evaluation": "metrics.json", "dataset": PROBLEMS_FILE}
"""A file that other stages read in an artifact of that kind."""


@dataclass(frozen=True, slots=True)
class StageWork:
    """A stage of a run whose inputs are there: its identity with the parts of that, its files."""

    name: str
    stage: StageBase
    inputs: Mapping[str, Artifact]
    identity: str
    parts: dict[str, str]
    files: StageFiles


def check_made(name: str, stage: StageBase, output: StageOutput, out: Path) -> None:
    """Raise `RunError` unless the stage made what its kind says, in its own folder."""
    plugin = f"correct `run` of kind '{stage.kind}'"
    if not isinstance(output, StageOutput):
        raise RunError(
            f"stage '{name}': it returned {type(output).__name__}, expected StageOutput: {plugin}"
        )
    odd = sorted(n for n, value in output.metrics.items() if not isinstance(value, int | float))
    if odd:
        raise RunError(f"stage '{name}': its metrics {odd} are not numbers, as float is: {plugin}")
    if not stage.passes_on and stage.makes not in output.made:
        raise RunError(
            f"stage '{name}': kind '{stage.kind}' says that it makes '{stage.makes}' and returned "
            f"{sorted(output.made)}: correct its `makes`, or {plugin}"
        )
    for kind, path in output.made.items():
        if not isinstance(path, Path) or not path.is_relative_to(out) or not path.exists():
            raise RunError(
                f"stage '{name}': its '{kind}' is {path}, expected an existing file or folder in "
                f"the stage's own folder (context.out): {plugin}"
            )
        if kind in HOLDS and not (path / HOLDS[kind]).is_file():
            raise RunError(
                f"stage '{name}': its '{kind}' {path} holds no {HOLDS[kind]}, which other stages "
                f"read: {plugin}"
            )


def store_result(
    store: ArtifactStore,
    work: StageWork,
    output: StageOutput,
    partial: Path,
    tracker: StageTracker,
    began: float,
) -> StageResult:
    """Digest what was made in the folder `partial`, link it in MLflow, move it to its final place.

    `began` is when the stage did, by `time.perf_counter`.
    """
    final = store.folder(work.name, work.identity)
    files = tree_digests(partial)
    artifacts = []
    for made_kind, path in output.made.items():
        relative = path.relative_to(partial).as_posix()
        digest = model_digest(digests_below(files, relative))
        uri = str(final / relative)
        model_id = ""
        if made_kind in MODELS:
            model_id = tracker.log_model_output(name=work.name, uri=uri, digest=digest, step=0)
        artifacts.append(
            Artifact(
                kind=made_kind,
                uri=str(path),
                digest=digest,
                stage=work.name,
                parents=tuple(artifact.digest for artifact in work.inputs.values()),
                mlflow_run_id=tracker.run_id,
                mlflow_model_id=model_id,
            )
        )
    result = StageResult(
        name=work.name,
        kind=work.stage.kind,
        status="resumed" if output.resumed else "ran",
        artifacts=tuple(artifacts),
        metrics=dict(output.metrics),
        seconds=time.perf_counter() - began,
        mlflow_run_id=tracker.run_id,
    )
    # Once the result is in place the stage is never run again: its record must be whole.
    tracker.flush()
    folder = store.commit(partial, result, work.identity, work.parts, files)
    moved = tuple(
        replace(item, uri=str(folder / Path(item.uri).relative_to(partial)))
        for item in result.artifacts
    )
    return replace(result, artifacts=moved)
