"""An evaluation after the run: an MLflow run of its own, next to the stages of the run, if any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from posttrain.core.redaction import redacted_tree
from posttrain.core.tracking import mlflow_store as store
from posttrain.core.tracking.journal import JournalRow
from posttrain.core.tracking.metric_names import check_names
from posttrain.core.tracking.mlflow_operations import TABLES_TAG, log_params
from posttrain.core.tracking.mlflow_run import measured, now_ms
from posttrain.core.tracking.mlflow_tracker import open_experiment
from posttrain.core.tracking.tables import logged_tables_tag, table_json

TABLE = "tables/samples.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """What MLflow gets: metrics, the first rows as a table, and the files of `folder`.

    `parent` is the MLflow run that it is put below, empty for none; `experiment` is the name of the
    experiment where there is no parent, or another server has it. `model_id` is MLflow's id of the
    model, on whose page the metrics are shown too; empty if it has none.
    """

    name: str
    experiment: str
    parent: str
    tags: Mapping[str, str]
    params: Mapping[str, object]
    metrics: Mapping[str, float]
    model_id: str
    rows: Sequence[Mapping[str, object]]
    folder: Path


def record_evaluation(uri: str, record: EvaluationRecord) -> tuple[str, str]:
    """Write the record as a finished run; returns the ids of experiment and run.

    Raises `ResourceError` where MLflow cannot be reached or refuses it.
    """
    check_names(record.metrics)
    client = store.connect(uri)
    with store.explained("record the evaluation", uri):
        parent_experiment = _experiment_of(client, record.parent)
        experiment_id = parent_experiment or open_experiment(client, uri, record.experiment)
        tags = dict(record.tags)
        if parent_experiment:
            tags["mlflow.parentRunId"] = record.parent
        run = client.create_run(experiment_id, tags=redacted_tree(tags), run_name=record.name)
        run_id = str(run.info.run_id)
        log_params(client, run_id, redacted_tree(record.params))
        row = JournalRow(0, now_ms(), measured(record.metrics))
        metrics = store.entities_of(row, _model_of(client, record.model_id))
        for begin in range(0, len(metrics), store.MAX_METRICS_PER_CALL):
            client.log_batch(run_id, metrics=metrics[begin : begin + store.MAX_METRICS_PER_CALL])
        client.log_artifacts(run_id, str(record.folder))
        client.log_text(run_id, table_json(record.rows), TABLE)
        client.set_tag(run_id, TABLES_TAG, logged_tables_tag([TABLE]))
        client.set_terminated(run_id, "FINISHED")
    return str(experiment_id), run_id


def _experiment_of(client: MlflowClient, run_id: str) -> str:
    """The experiment of a run; empty where this server has no such run."""
    if not run_id:
        return ""
    try:
        return str(client.get_run(run_id).info.experiment_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return ""


def _model_of(client: MlflowClient, model_id: str) -> str:
    """The model's id, empty where this server has no such model."""
    if not model_id:
        return ""
    try:
        client.get_logged_model(model_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return ""
    return model_id
