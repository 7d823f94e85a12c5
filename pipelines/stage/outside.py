"""What decides a stage in addition to its inputs and its config: the registry's champion, the new
rows.
"""

from __future__ import annotations

from collections.abc import Mapping

from posttrain.core.config.base import StageBase
from posttrain.core.config.gate_stages import NewDataStage, PromoteStage
from posttrain.core.store.artifacts import Artifact, StageResult

CHAMPION = "champion"
"""Role under which `promote` reads the champion of the registry, which no stage makes."""


def outside_digests_of(stage: StageBase, rows_digest: str) -> dict[str, str]:
    """Digests that go into the stage's identity as if they were inputs."""
    return {"rows": rows_digest} if isinstance(stage, NewDataStage) else {}


def no_longer_true(found: StageResult, inputs: Mapping[str, Artifact]) -> bool:
    """Whether a promotion that was computed before has been taken back since.

    It was compared with the champion of now, was better, and is not the champion: somebody moved
    the alias. Whether it may be promoted again is to be decided, not to be read from the past.
    """
    if found.kind != "promote" or not found.metrics["promote/promoted"]:
        return False
    champion = inputs.get(CHAMPION)
    return champion is None or champion.digest != inputs["model"].digest


def champion_input(uri: str, stage: PromoteStage) -> dict[str, Artifact]:
    """The champion that the stage compares with, as an input of its own role; none at first."""
    from posttrain.core.tracking.registry import find_alias

    found = find_alias(uri, stage.registered_name, stage.alias)
    if found is None:
        return {}
    artifact = Artifact(
        kind="model",
        uri=str(found.path),
        digest=found.digest,
        stage=CHAMPION,
        mlflow_run_id=found.run_id,
        mlflow_model_id=found.model_id,
    )
    return {CHAMPION: artifact}
