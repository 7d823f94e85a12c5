"""The MLflow run of one stage: stepped metrics, tables, traces, datasets and models in and out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from posttrain.core.errors import RunError
from posttrain.core.tracking.journal import Journal, JournalRow
from posttrain.core.tracking.metric_names import check_names, left_out
from posttrain.core.tracking.mlflow_run import (
    FinalStatus,
    Metrics,
    MlflowRun,
    Session,
    TracedResponse,
    measured,
    now_ms,
)
from posttrain.core.tracking.spool import placeholder

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
        kept = journal.kept if journal else []
        for row in kept:
            self._restored.setdefault(row.step, set()).update(row.metrics)
            self._latest.update(row.metrics)
            self._last_step = row.step
        if kept:
            rows = [(row.step, row.time_ms, dict(row.metrics)) for row in kept]
            self._submit("rows", "restored steps", rows=rows)

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
        self._submit("table", f"table {path}", path=path, rows=list(rows))

    def log_traces(self, responses: Sequence[TracedResponse]) -> None:
        """Show single responses as traces of the run, in the background.

        Training goes on without them: what a server does not take is a warning in the log, reported
        once, and no more is tried.
        """
        for traced in responses:
            content = {name: getattr(traced, name) for name in TracedResponse.__slots__}
            self._submit("trace", f"a trace of step {traced.step}", traced=content)

    def log_dataset(
        self, name: str, context: str, digest: str, num_rows: int, source: str, of: str = ""
    ) -> None:
        """Show a dataset (sha256 `digest`, `source` a path or hub id) as an input of the run.

        It is shown on the pipeline's run too.
        `of` is the digest of the whole of what the dataset is a part of, where there is one.
        """
        profile = {"num_rows": num_rows, "sha256": digest} | ({"source_sha256": of} if of else {})
        dataset = {
            "name": name,
            "digest": digest[:MAX_DIGEST],
            "source_type": "local",
            "source": json.dumps({"uri": source}),
            "profile": json.dumps(profile),
        }
        for run_id in (self._run_id, self._parent_id):
            self._session.writer.submit(
                {
                    "op": "dataset",
                    "what": f"dataset {name}",
                    "run": run_id,
                    "context": context,
                    "dataset": dataset,
                }
            )

    def log_model_output(self, *, name: str, uri: str, digest: str, step: int) -> str:
        """Record a model this run made, by reference: nothing is copied.

        Returns its id "m-...", or a placeholder while MLflow is away.
        """
        return self._session.writer.call(
            {
                "op": "model",
                "what": f"model {name}",
                "request": placeholder(),
                "runs": [self._run_id, self._parent_id],
                "name": name,
                "uri": uri,
                "digest": digest,
                "step": step,
            }
        )

    def log_model_input(self, model_id: str) -> None:
        self._submit("model_input", f"model input {model_id}", model_id=model_id)

    def finish(self, status: FinalStatus) -> None:
        """Flush and end the run; a second call does nothing. Raises what went wrong unseen."""
        if self._journal is not None:
            self._journal.close()
        self.end(status)

    def _require_open(self) -> None:
        if self.finished:
            raise RunError(f"run {self.run_id} is finished: start a new stage to record more")
