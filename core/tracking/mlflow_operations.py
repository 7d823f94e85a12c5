"""How each kind of operation is sent to MLflow. All can be sent twice and leave the same.

What makes a run or a model carries its placeholder in a tag. An operation that may have been sent
before looks for the tag first, so that a kill or an answer that was cut off makes nothing twice.
Of traces, one may then be there twice.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import (
    Dataset,
    DatasetInput,
    InputTag,
    LoggedModel,
    LoggedModelInput,
    LoggedModelOutput,
    LoggedModelStatus,
    Param,
    RunTag,
)
from mlflow.exceptions import MlflowException
from mlflow.models.model import MLMODEL_FILE_NAME
from mlflow.models.utils import get_external_mlflow_model_spec
from mlflow.utils.mlflow_tags import MLFLOW_MODEL_IS_EXTERNAL, MLFLOW_RUN_NOTE

from posttrain.core.store.identity import flat
from posttrain.core.store.provenance import source_tags
from posttrain.core.tracking import mlflow_store as store
from posttrain.core.tracking.journal import JournalRow
from posttrain.core.tracking.mlflow_run import TracedResponse, write_trace
from posttrain.core.tracking.registry import how_to_load
from posttrain.core.tracking.shared_view import TAG as VIEW_TAG
from posttrain.core.tracking.shared_view import packed
from posttrain.core.tracking.spool import PENDING, Operation
from posttrain.core.tracking.tables import logged_tables_tag, table_json
from posttrain.core.tracking.writer import unreachable

logger = logging.getLogger(__name__)
MAX_PARAMS_PER_CALL = 100  # MLflow's own limit
TABLES_TAG = "mlflow.loggedArtifacts"


class Sender:
    """Sends operations to one tracking server; called by one thread."""

    def __init__(self, client: MlflowClient, uri: str, experiment_id: str) -> None:
        self.client, self.uri, self.experiment_id = client, uri, experiment_id
        self._tables: dict[str, list[str]] = {}
        self._without_traces: set[str] = set()
        self._kinds: dict[str, Callable[[Operation, bool], str | None]] = {
            "run": self._run,
            "metrics": self._metrics,
            "rows": self._rows,
            "tags": self._tags,
            "name": self._name,
            "view": self._view,
            "text": self._text,
            "file": self._file,
            "table": self._table,
            "trace": self._trace,
            "dataset": self._dataset,
            "model": self._model,
            "known_model": self._known_model,
            "model_input": self._model_input,
            "end": self._end,
            "ask": self._ask,
        }

    def __call__(self, operation: Operation, again: bool) -> str:
        return self._kinds[operation["op"]](operation, again) or ""

    def _run(self, operation: Operation, again: bool) -> str:
        run_id = store.requested_run(self.client, operation["request"]) if again else ""
        if not run_id:
            tags = self._known_ids(operation["tags"]) | {store.TAG_REQUEST: operation["request"]}
            made = self.client.create_run(
                self.experiment_id, operation["began"], tags, run_name=operation["name"]
            )
            run_id = str(made.info.run_id)
        log_params(self.client, run_id, operation["params"])
        return run_id

    def _known_ids(self, tags: Mapping[str, str]) -> dict[str, str]:
        """The tags with the id of a reused run that another process recorded later."""
        original = tags.get(store.TAG_CACHED_FROM, "")
        if not original.startswith(PENDING):
            return dict(tags)
        found = store.requested_run(self.client, original) or original
        return {key: value.replace(original, found) for key, value in tags.items()}

    def _metrics(self, operation: Operation, again: bool) -> None:
        row = JournalRow(operation["step"], operation["time_ms"], operation["metrics"])
        entities = store.entities_of(row, operation["model_id"])
        # MLflow ignores the same point for the second time.
        self.client.log_batch(operation["run"], metrics=entities)

    def _rows(self, operation: Operation, again: bool) -> None:
        rows = [JournalRow(*row) for row in operation["rows"]]
        write = store.recover_rows if again else store.log_rows
        write(self.client, operation["run"], rows)

    def _tags(self, operation: Operation, again: bool) -> None:
        tags = [RunTag(key, value) for key, value in operation["tags"].items()]
        self.client.log_batch(operation["run"], tags=tags)

    def _name(self, operation: Operation, again: bool) -> None:
        self.client.update_run(operation["run"], name=operation["name"])

    def _view(self, operation: Operation, again: bool) -> None:
        """A layout of charts: training goes on where a server does not take it."""
        name, state = operation["name"], packed(operation["state"])
        try:
            save = partial(self.client.set_experiment_tag, self.experiment_id, f"{VIEW_TAG}{name}")
            store.upsert(partial(save, state))
        except MlflowException as error:
            if unreachable(error):
                raise
            logger.warning("MLflow's view '%s' could not be saved: %s", name, error)

    def _text(self, operation: Operation, again: bool) -> None:
        self.client.log_text(operation["run"], operation["text"], operation["path"])

    def _file(self, operation: Operation, again: bool) -> None:
        path = Path(operation["file"])
        copy = self.client.log_artifacts if path.is_dir() else self.client.log_artifact
        copy(operation["run"], str(path), operation["folder"] or None)

    def _table(self, operation: Operation, again: bool) -> None:
        run_id, path = operation["run"], operation["path"]
        self.client.log_text(run_id, table_json(operation["rows"]), path)
        if run_id not in self._tables:
            tag = self.client.get_run(run_id).data.tags.get(TABLES_TAG, "[]")
            self._tables[run_id] = [entry["path"] for entry in json.loads(tag)]
        paths = self._tables[run_id]
        if path not in paths:
            paths.append(path)
        self.client.set_tag(run_id, TABLES_TAG, logged_tables_tag(paths))

    def _trace(self, operation: Operation, again: bool) -> None:
        """Training goes on without traces: what a server does not take is reported once a run."""
        run_id = operation["run"]
        if run_id in self._without_traces:
            return
        try:
            traced = TracedResponse(**operation["traced"])
            write_trace(self.uri, self.experiment_id, run_id, traced)
        except MlflowException as error:
            if unreachable(error):
                raise
            self._without_traces.add(run_id)
            logger.warning("responses of run %s are not shown as traces: %s", run_id, error)

    def _dataset(self, operation: Operation, again: bool) -> None:
        tag = InputTag("mlflow.data.context", operation["context"])
        dataset = DatasetInput(Dataset(**operation["dataset"]), [tag])
        store.upsert(partial(self.client.log_inputs, operation["run"], datasets=[dataset]))

    def _model(self, operation: Operation, again: bool) -> str:
        found = self._tagged_model(store.TAG_REQUEST, operation["request"]) if again else ""
        made = self.client.get_logged_model(found) if found else self._new_model(operation)
        if made.status != LoggedModelStatus.READY:
            self._complete(made)
        model_id = str(made.model_id)
        for run_id in operation["runs"]:
            if not (again and self._has_output(run_id, model_id)):
                outputs = [LoggedModelOutput(model_id, operation["step"])]
                self.client.log_outputs(run_id, outputs)
        return model_id

    def _known_model(self, operation: Operation, again: bool) -> str:
        """A model of this server, by its id or its files; else it is entered as made by the run."""
        known = operation["model_id"]
        if known and not known.startswith(PENDING) and self._exists(known):
            return str(known)
        found = self._tagged_model("posttrain.digest", operation["digest"], operation["uri"])
        made_before = again and self._tagged_model(store.TAG_REQUEST, operation["request"])
        return found if found and not made_before else self._model(operation, again)

    def _tagged_model(self, tag: str, value: str, uri: str = "") -> str:
        quoted = value.replace("'", "")
        found = self.client.search_logged_models(
            [self.experiment_id], filter_string=f"tags.`{tag}` = '{quoted}'"
        )
        fitting = (m for m in found if not uri or m.tags.get("posttrain.uri") == uri)
        return next((str(model.model_id) for model in fitting), "")

    def _has_output(self, run_id: str, model_id: str) -> bool:
        outputs = self.client.get_run(run_id).outputs
        return outputs is not None and any(o.model_id == model_id for o in outputs.model_outputs)

    def _new_model(self, operation: Operation) -> LoggedModel:
        """An entry for a model's files, which `_complete` makes ready.

        Together they are `mlflow.create_external_model`, which besides looks for a notebook and a
        repository by loading IPython and GitPython, and makes nothing ready that was cut off.
        """
        return self.client.create_logged_model(
            self.experiment_id,
            name=operation["name"],
            source_run_id=operation["runs"][0],
            tags={
                **source_tags(),
                "posttrain.uri": operation["uri"],
                "posttrain.digest": operation["digest"],
                store.TAG_REQUEST: operation["request"],
                MLFLOW_RUN_NOTE: how_to_load(operation["uri"]),
                MLFLOW_MODEL_IS_EXTERNAL: "true",
            },
            model_type="language-model",
        )

    def _complete(self, made: LoggedModel) -> None:
        """Give an entry the specification that a registry asks for; no weights are copied."""
        with tempfile.TemporaryDirectory() as folder:
            specification = get_external_mlflow_model_spec(made)
            specification.save(str(Path(folder) / MLMODEL_FILE_NAME))
            self.client.log_model_artifacts(made.model_id, folder)
        self.client.finalize_logged_model(made.model_id, LoggedModelStatus.READY)

    def _exists(self, model_id: str) -> bool:
        try:
            self.client.get_logged_model(model_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise
        return True

    def _model_input(self, operation: Operation, again: bool) -> None:
        models = [LoggedModelInput(operation["model_id"])]
        self.client.log_inputs(operation["run"], models=models)

    def _end(self, operation: Operation, again: bool) -> None:
        self.client.set_terminated(operation["run"], operation["status"], operation["ended"])

    def _ask(self, operation: Operation, again: bool) -> str:
        return str(self.client.get_experiment(self.experiment_id).experiment_id)


def log_params(client: MlflowClient, run_id: str, params: Mapping[str, Any]) -> None:
    entities = [
        Param(key, value if isinstance(value, str) else json.dumps(value, default=str))
        for key, value in flat(params)
    ]
    for begin in range(0, len(entities), MAX_PARAMS_PER_CALL):
        client.log_batch(run_id, params=entities[begin : begin + MAX_PARAMS_PER_CALL])
