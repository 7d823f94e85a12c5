"""Everything a pipeline records: one parent run, one child run per stage, registered models."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from posttrain.core.errors import ResourceError, RunError
from posttrain.core.redaction import redacted_tree
from posttrain.core.tracking import mlflow_store as store
from posttrain.core.tracking.journal import Journal, JournalRow, journal_path
from posttrain.core.tracking.metric_names import check_names, find_metric
from posttrain.core.tracking.mlflow_operations import log_params
from posttrain.core.tracking.mlflow_run import (
    FinalStatus,
    KnownModel,
    Metrics,
    MlflowRun,
    Session,
    measured,
    now_ms,
)
from posttrain.core.tracking.mlflow_stage import StageTracker as StageTracker
from posttrain.core.tracking.mlflow_store import kill_running as kill_running
from posttrain.core.tracking.mlflow_store import prepare_database as prepare_database
from posttrain.core.tracking.outage import left_behind, open_writer, send_waiting
from posttrain.core.tracking.spool import placeholder

EXPERIMENT_KIND = {"mlflow.experimentKind": "custom_model_development"}
"""Without it MLflow takes an experiment with tables for one about prompts, and shows it as such."""


class PipelineTracker(MlflowRun):
    """The parent run of a pipeline. Made by `start`; stages may run in several threads."""

    def __init__(
        self, session: Session, run_id: str, run_name: str, source: Mapping[str, str]
    ) -> None:
        super().__init__(session, run_id)
        self._run_name = run_name
        self._source = dict(source)
        self.uri = session.uri
        self.experiment_id = session.experiment_id
        self.killed_runs: list[str] = []
        self.sent_before: list[str] = []
        self._stages: list[StageTracker] = []
        self._stage_names: set[str] = set()
        self._lock = threading.Lock()

    @classmethod
    def start(
        cls,
        *,
        uri: str,
        experiment: str,
        run_name: str,
        config_yaml: str,
        params: Mapping[str, object],
        tags: Mapping[str, str],
        source: Mapping[str, str] | None = None,
        journal: Path | None = None,
        artifacts: Path | None = None,
    ) -> PipelineTracker:
        """Open the parent run and store the config as config.yaml.

        `uri` is a server's address or sqlite:////abs/mlflow.db, whose artifacts then lie next to
        it. `source` are tags that say which code runs and who started it, here and on every stage.
        `journal` is the folder for write-ahead records; with None a kill loses the last steps.
        `artifacts` is the store whose manifests get MLflow's ids when placeholders were used.
        Runs that dead processes left open are ended first (their ids: `killed_runs`).
        What earlier runs could not send is sent before that (in sentences: `sent_before`).
        Raises `ResourceError` when MLflow cannot be reached, within about ten seconds.
        """
        client = store.connect(uri)
        sent = [] if journal is None else send_waiting(journal, uri)
        killed = store.kill_running(uri)
        with store.explained("start a run", uri):
            experiment_id = open_experiment(client, uri, experiment)
            shown = redacted_tree({**tags, **(source or {}), **store.process_tags(journal)})
            run = client.create_run(experiment_id, run_name=run_name, tags=shown)
            run_id = str(run.info.run_id)
            log_params(client, run_id, redacted_tree(params))
        writer = open_writer(client, uri, experiment_id, run_id, journal, artifacts)
        session = Session(client, writer, uri, experiment_id, journal)
        tracker = cls(session, run_id, run_name, source or {})
        tracker.killed_runs, tracker.sent_before = killed, sent
        tracker.log_text(config_yaml, "config.yaml")
        return tracker

    def stage(
        self,
        name: str,
        kind: str,
        params: Mapping[str, object],
        *,
        identity: str = "",
        resumed_step: int | None = None,
    ) -> StageTracker:
        """Open a child run for a stage.

        Journals are kept by name and `identity`, so that runs next to each other have their own.
        `resumed_step` is the step of the checkpoint that an interrupted stage continues from: the
        journal's rows up to it are written to the new run, so its history is complete. With None
        the stage starts again and an old journal of it is dropped.
        """
        session, folder = self._session, self._session.journal
        path = None if folder is None else journal_path(folder, name, identity)
        tags = self._child_tags(name, kind) | store.process_tags(folder, path)
        if resumed_step is not None:
            tags["posttrain.resumed_step"] = str(resumed_step)
        run_id = self._create(f"stage {name}", name, tags, params)
        journal = None if path is None else Journal(path, keep_through=resumed_step)
        tracker = StageTracker(session, run_id, self.run_id, journal)
        with self._lock:
            self._stages.append(tracker)
        return tracker

    def cached_stage(
        self, name: str, kind: str, original_run_id: str, metrics: Mapping[str, float]
    ) -> str:
        """A child run, finished at once, for a stage whose results are reused; returns its id."""
        session = self._session
        check_names(metrics)
        tags = self._child_tags(name, kind) | {
            store.TAG_CACHED_FROM: original_run_id,
            "mlflow.note.content": f"Not computed again: reuses results of run {original_run_id}.",
        }
        run_id = self._create(f"cached stage {name}", name, tags, {})
        run = MlflowRun(session, run_id)
        run.submit_metrics(JournalRow(0, now_ms(), measured(metrics)))
        run.end("FINISHED")
        return run_id

    def known_models(self, run_id: str, name: str, models: Sequence[KnownModel]) -> list[str]:
        """The id that each model of the reused stage `name` has in this tracking server.

        It is the model's own, or, where another server made it, that of an entry for the same
        files, which is an output of `run_id` if it is new. It is a placeholder while MLflow is
        away.
        """
        return [
            self._session.writer.call(
                {
                    "op": "known_model",
                    "what": f"models of {name}",
                    "request": placeholder(),
                    "runs": [run_id],
                    "name": name,
                    "step": 0,
                    **asdict(model),
                }
            )
            for model in models
        ]

    def news(self) -> list[str]:
        """Sentences for the user since the last call: MLflow is away, MLflow is back."""
        return self._session.writer.news()

    def real(self, placeholder_or_id: str) -> str:
        """An id of MLflow's in the place of a placeholder, once it is known."""
        return self._session.writer.real(placeholder_or_id)

    def wait(self, patience_s: float) -> bool:
        """Wait until MLflow has everything; False when it is still away after `patience_s`."""
        return self._session.writer.wait(patience_s)

    def answers(self) -> bool:
        """Whether MLflow answers now and has everything that was handed over."""
        asked = {"op": "ask", "what": "a question", "request": placeholder()}
        return self._session.writer.answers(asked)

    def log_metrics(self, metrics: Metrics) -> None:
        """Record summary metrics; a key may begin with a stage's name: `rl/reward/mean`."""
        values = measured(metrics)
        check_names(self._without_stage(name) for name in values)
        if values:
            self.submit_metrics(JournalRow(0, now_ms(), values))

    def finish(self, status: FinalStatus) -> str:
        """End the run, and stages that are still open, with `status`; a second call does nothing.

        Everything queued is written first, to disk if MLflow is away; the sentence that is returned
        then says what is left, and what sends it. Raises `RunError` for a write that was refused;
        the run is then ended all the same, as FAILED if `status` was FINISHED.
        """
        if self.finished:
            return ""
        errors: list[RunError] = []
        for end in [*(stage.finish for stage in self._stages), self.end]:
            try:
                end(status)
            except RunError as error:  # the other runs must be ended too
                errors.append(error)
        spool = self._session.writer.spool
        left = self._session.writer.close()
        if errors:
            raise errors[0]
        refusal = self._session.writer.refusal
        return left_behind(left, self.uri, spool.folder, refusal) if left else ""

    def _create(
        self, what: str, name: str, tags: Mapping[str, str], params: Mapping[str, object]
    ) -> str:
        """A run for a stage; its placeholder while MLflow is away."""
        return self._session.writer.call(
            {
                "op": "run",
                "what": what,
                "request": placeholder(),
                "name": name,
                "tags": dict(tags),
                "params": dict(params),
                "began": now_ms(),
            }
        )

    def _child_tags(self, name: str, kind: str) -> dict[str, str]:
        self._stage_names.add(name)
        return self._source | {
            "mlflow.parentRunId": self.run_id,
            store.TAG_STAGE: name,
            store.TAG_KIND: kind,
            "run": self._run_name,
        }

    def _without_stage(self, name: str) -> str:
        stage, _, rest = name.partition("/")
        # A stage may be called like a group of metrics: `eval/gain` is then still a metric.
        if find_metric(name) or stage not in self._stage_names:
            return name
        return rest


def open_experiment(client: MlflowClient, uri: str, name: str) -> str:
    """The experiment's id, made if it is new; next to a SQLite database its artifacts are too."""
    found = client.get_experiment_by_name(name)
    if found is None:
        root = store.artifact_root(uri)
        try:
            place = (root / name).as_uri() if root else None
            return client.create_experiment(name, place, EXPERIMENT_KIND)
        except MlflowException as error:  # another process may have made it meanwhile
            found = client.get_experiment_by_name(name)
            if found is None:
                raise error
    if found.lifecycle_stage != "active":
        raise ResourceError(
            f"the MLflow experiment '{name}' was deleted: restore it with `mlflow experiments "
            f"restore --experiment-id {found.experiment_id}`, or change `name` in the config"
        )
    return str(found.experiment_id)
