"""The MLflow run of one stage: stepped metrics, tables, traces, datasets and models in and out."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import partial

from mlflow import MlflowClient
from mlflow.entities import (
    Dataset,
    DatasetInput,
    InputTag,
    LoggedModelInput,
    LoggedModelOutput,
)
from mlflow.exceptions import MlflowException

from posttrain.core.errors import RunError
from posttrain.core.redaction import redacted
from posttrain.core.tracking import mlflow_store as store
from posttrain.core.tracking.journal import Journal, JournalRow
from posttrain.core.tracking.metric_names import check_names, left_out
from posttrain.core.tracking.mlflow_run import (
    FinalStatus,
    Metrics,
    MlflowRun,
    Session,
    TracedResponse,
    make_entry,
    measured,
    now_ms,
    write_trace,
)
from posttrain.core.tracking.tables import logged_tables_tag, table_json

logger = logging.getLogger(__name__)
MAX_DIGEST = 36  # MLflow's limit for a dataset's digest; the whole one is kept in the profile


class StageTracker(MlflowRun):
    """One stage's MLflow run, made by `PipelineTracker.stage`; one thread at a time may use it."""

    def __init__(
        self, session: Session, run_id: str, parent_id: str, journal: Journal | None
    ) -> None:
        super().__init__(session, run_id)
        self._parent_id = parent_id
        self._journal = journal
        self._latest: dict[str, float] = {}
        self._last_step = 0
        self._restored: dict[int, set[str]] = {}
        self._tables: list[str] = []
        self._traces_refused = False
        kept = journal.kept if journal else []
        for row in kept:
            self._restored.setdefault(row.step, set()).update(row.metrics)
            self._latest.update(row.metrics)
            self._last_step = row.step
        if kept:
            session.writer.submit(
                "restored steps", lambda: store.log_rows(session.client, run_id, kept)
            )

    def log_step(self, step: int, metrics: Metrics) -> tuple[str, ...]:
        """Record what was measured at an optimizer step: at most 100 keys, no None, no NaN.

        Returns the names that are left out because there are more. The journal is written before
        this returns, MLflow by the background thread in one call. What was restored from an
        interrupted run is not recorded twice. Raises `RunError` for an unknown metric, and for an
        earlier write that failed.
        """
        values = measured(metrics)
        check_names(values)
        beyond = left_out(values)
        for name in beyond:
            del values[name]
        self._require_open()
        known = self._restored.get(step, set())
        row = JournalRow(step, now_ms(), {k: v for k, v in values.items() if k not in known})
        if row.metrics:
            if self._journal is not None:
                self._journal.append(row)
            self._latest.update(row.metrics)
            self._last_step = max(self._last_step, step)
            self.submit_metrics(row)
        return beyond

    def log_summary(self, metrics: Metrics, model_id: str = "") -> None:
        """Record final values at the last step seen; a value already there is not repeated."""
        values = measured(metrics)
        check_names(values)
        self._require_open()
        fresh = {k: v for k, v in values.items() if model_id or self._latest.get(k) != v}
        if fresh:
            self._latest.update(fresh)
            self.submit_metrics(JournalRow(self._last_step, now_ms(), fresh), model_id)

    def log_table(self, name: str, step: int | None, rows: Sequence[Mapping[str, object]]) -> None:
        """Store `rows` as tables/`name`/step-000010.json, which MLflow shows as a table.

        Without a step they are tables/`name`.json, in the place of what was there.
        """
        path = f"tables/{name}.json" if step is None else f"tables/{name}/step-{step:06d}.json"
        kept = list(rows)
        self._session.writer.submit(f"table {path}", lambda: self._write_table(path, kept))

    def _write_table(self, path: str, rows: Sequence[Mapping[str, object]]) -> None:
        client = self._session.client
        client.log_text(self.run_id, table_json(rows), path)
        if path not in self._tables:
            self._tables.append(path)
        client.set_tag(self.run_id, "mlflow.loggedArtifacts", logged_tables_tag(self._tables))

    def log_traces(self, responses: Sequence[TracedResponse]) -> None:
        """Show single responses as traces of the run, in the background.

        Training goes on without them: what a server does not take is a warning in the log, reported
        once, and no more is tried.
        """
        for traced in responses:
            write = partial(self._write_trace, traced)
            self._session.writer.submit(f"a trace of step {traced.step}", write)

    def _write_trace(self, traced: TracedResponse) -> None:
        if self._traces_refused:
            return
        try:
            write_trace(self._session, self.run_id, traced)
        except MlflowException as error:
            self._traces_refused = True
            logger.warning("responses of run %s are not shown as traces: %s", self.run_id, error)

    def log_dataset(
        self, name: str, context: str, digest: str, num_rows: int, source: str, of: str = ""
    ) -> None:
        """Show a dataset (sha256 `digest`, `source` a path or hub id) as an input of the run.

        It is shown on the pipeline's run too.
        `of` is the digest of the whole of what the dataset is a part of, where there is one.
        """
        profile = {"num_rows": num_rows, "sha256": digest} | ({"source_sha256": of} if of else {})
        dataset = Dataset(
            name=name,
            digest=digest[:MAX_DIGEST],
            source_type="local",
            source=json.dumps({"uri": redacted(source)}),
            profile=json.dumps(profile),
        )
        tagged = DatasetInput(dataset, [InputTag("mlflow.data.context", context)])
        for run_id in (self.run_id, self._parent_id):
            self._session.writer.submit(
                f"dataset {name}", partial(_log_input, self._session.client, run_id, tagged)
            )

    def log_model_output(self, *, name: str, uri: str, digest: str, step: int) -> str:
        """Record a model this run made, by reference: nothing is copied. Returns its id "m-..."."""
        session = self._session

        def write() -> str:
            made = make_entry(session, self.run_id, name, uri, digest)
            for run_id in (self.run_id, self._parent_id):
                session.client.log_outputs(run_id, [LoggedModelOutput(made, step)])
            return made

        return session.writer.call(f"model {name}", write)

    def log_model_input(self, model_id: str) -> None:
        self._session.writer.submit(
            f"model input {model_id}",
            lambda: self._session.client.log_inputs(
                self.run_id, models=[LoggedModelInput(model_id)]
            ),
        )

    def finish(self, status: FinalStatus) -> None:
        """Flush and end the run; a second call does nothing. Raises what went wrong unseen."""
        if self._journal is not None:
            self._journal.close()
        self.end(status)

    def _require_open(self) -> None:
        if self.finished:
            raise RunError(f"run {self.run_id} is finished: start a new stage to record more")


def _log_input(client: MlflowClient, run_id: str, dataset: DatasetInput) -> None:
    """Make `dataset` an input of the run.

    MLflow looks whether the dataset is known and then adds it. Another run may add it in between,
    which the database refuses ("UNIQUE constraint failed", "violates unique constraint"): then it
    is there, and the second look finds it.
    """
    try:
        client.log_inputs(run_id, datasets=[dataset])
    except MlflowException as error:
        if "unique constraint" not in str(error).lower():
            raise
        client.log_inputs(run_id, datasets=[dataset])
