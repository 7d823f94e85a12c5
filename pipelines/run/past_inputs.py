"""What a stage of a past run read."""

from __future__ import annotations

from pathlib import Path

from posttrain.core.config.base import BASE_MODEL
from posttrain.core.config.schema import RunConfig
from posttrain.core.errors import ResourceError
from posttrain.core.models.source import obtain
from posttrain.core.store.artifacts import Artifact, ArtifactStore
from posttrain.core.store.run_record import RunRecord


def inputs_read(
    config: RunConfig, record: RunRecord, stage: str, home: Path, store: ArtifactStore
) -> dict[str, Artifact]:
    """What a stage of a run read; raises `ResourceError` where some of it is gone or damaged."""
    found = {}
    for role, source in config.stages[stage].inputs.items():
        if source == BASE_MODEL:
            base = obtain(config.model, home / "models")
            found[role] = Artifact("model", str(base.path), base.digest, BASE_MODEL)
            continue
        result, reason = store.lookup(source, record.stages.get(source, ""))
        if result is None:
            raise ResourceError(
                f"the stage reads what stage '{source}' made, which is not in {store.root} any "
                f"more ({reason}): the `posttrain run` command of this run makes it again"
            )
        found[role] = result.artifact(config.stages[source].makes)
    return found
