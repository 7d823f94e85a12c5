"""A home with a run whose stages are done, without the minutes of training."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from posttrain.core.store.artifacts import Artifact, ArtifactStore, StageResult
from posttrain.core.store.manifests import model_digest, tree_digests
from posttrain.core.store.run_record import RunRecorder
from posttrain.core.types import ArtifactKind
from tests.helpers.pipeline import tiny_config

RUN = "ab12cd34" * 4


def made_stage(
    store: ArtifactStore,
    name: str,
    model: Path,
    *,
    kind: str,
    makes: ArtifactKind = "model",
    mlflow_run_id: str = "",
) -> str:
    """Store a finished stage that made a copy of `model`; returns its identity."""
    identity = (name.encode().hex() * 32)[:64]
    partial = store.begin(name)
    shutil.copytree(model, partial / makes)
    digest = model_digest(tree_digests(partial / makes))
    item = Artifact(makes, str(partial / makes), digest, name, ("0" * 64,), mlflow_run_id, "m-1")
    result = StageResult(name, kind, "ran", (item,), {}, 1.0, mlflow_run_id)
    parts = {"input model": "0" * 64, "posttrain": "0.1.0"}
    store.commit(partial, result, identity, parts, tree_digests(partial))
    return identity


def made_run(
    home: Path, model: Path, run_id: str = RUN, config: Mapping[str, Any] | None = None
) -> RunRecorder:
    """A run of this home with stages `sft` (of MLflow's run 5555...) and `rm`, a reward model."""
    store = ArtifactStore(home / "artifacts")
    text = yaml.safe_dump(dict(config or tiny_config(model)))
    record = RunRecorder(home, run_id, "tiny", "2026-01-02T03:04:05+00:00", text)
    record.stage("sft", made_stage(store, "sft", model, kind="sft", mlflow_run_id="5" * 32))
    reward = made_stage(store, "rm", model, kind="reward_model", makes="reward_model")
    record.stage("rm", reward)
    record.stage("rl", "f" * 64)  # began, and is not done
    return record
