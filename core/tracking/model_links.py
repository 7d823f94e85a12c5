"""Models of reused results: the tracking server may be another than the one they were logged in."""

from __future__ import annotations

from dataclasses import dataclass

import mlflow
from mlflow.entities import LoggedModelOutput
from mlflow.exceptions import MlflowException

from posttrain.core.tracking.mlflow_run import Session


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model in a store: its id in the MLflow that it was logged in, where it is, its sha256."""

    model_id: str
    uri: str
    digest: str


def known_here(session: Session, run_id: str, name: str, model: KnownModel) -> str:
    """The id of `model` in this tracking server, where `run_id` makes it if there is none."""
    if model.model_id and _exists(session, model.model_id):
        return model.model_id
    quoted = model.digest.replace("'", "")
    same = session.client.search_logged_models(
        [session.experiment_id], filter_string=f"tags.`posttrain.digest` = '{quoted}'"
    )
    for found in same:
        if found.tags.get("posttrain.uri") == model.uri:
            return str(found.model_id)
    made = make_entry(session, run_id, name, model.uri, model.digest)
    session.client.log_outputs(run_id, [LoggedModelOutput(made, 0)])
    return made


def make_entry(session: Session, run_id: str, name: str, uri: str, digest: str) -> str:
    """A new entry for a model's files, made by the run; nothing is copied. Returns its id."""
    mlflow.set_tracking_uri(session.uri)
    made = mlflow.create_external_model(
        name=name,
        source_run_id=run_id,
        tags={"posttrain.uri": uri, "posttrain.digest": digest},
        model_type="language-model",
        experiment_id=session.experiment_id,
    )
    return str(made.model_id)


def _exists(session: Session, model_id: str) -> bool:
    try:
        session.client.get_logged_model(model_id)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return False
        raise
    return True
