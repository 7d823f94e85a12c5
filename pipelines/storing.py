"""What a stage made, put into the store: digested, linked in MLflow, moved to its final place."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from posttrain.core.artifacts import (
    Artifact,
    ArtifactStore,
    StageResult,
    combine_digests,
    digests_below,
    tree_digests,
)
from posttrain.core.tracking.mlflow_stage import StageTracker
from posttrain.pipelines.stages.context import StageOutput

MODELS = ("model", "reward_model")
"""Kinds of artifacts that MLflow has an entry of."""


def store_result(
    store: ArtifactStore,
    name: str,
    kind: str,
    output: StageOutput,
    inputs: Mapping[str, Artifact],
    identity: str,
    parts: dict[str, str],
    partial: Path,
    tracker: StageTracker,
    began: float,
) -> StageResult:
    """Digest what was made, link it in MLflow, move it to its final place."""
    final = store.folder(name, identity)
    files = tree_digests(partial)
    artifacts = []
    for made_kind, path in output.made.items():
        relative = path.relative_to(partial).as_posix()
        digest = combine_digests(digests_below(files, relative))
        uri = str(final / relative)
        model_id = ""
        if made_kind in MODELS:
            model_id = tracker.log_model_output(name=name, uri=uri, digest=digest, step=0)
        artifacts.append(
            Artifact(
                kind=made_kind,
                uri=str(path),
                digest=digest,
                stage=name,
                parents=tuple(artifact.digest for artifact in inputs.values()),
                mlflow_run_id=tracker.run_id,
                mlflow_model_id=model_id,
            )
        )
    result = StageResult(
        name=name,
        kind=kind,
        status="resumed" if output.resumed else "ran",
        artifacts=tuple(artifacts),
        metrics=dict(output.metrics),
        seconds=time.perf_counter() - began,
        mlflow_run_id=tracker.run_id,
    )
    # Once the result is in place the stage is never run again: its record must be whole.
    tracker.flush()
    folder = store.commit(partial, result, identity, parts, files)
    moved = tuple(
        replace(item, uri=str(folder / Path(item.uri).relative_to(partial)))
        for item in result.artifacts
    )
    return replace(result, artifacts=moved)
