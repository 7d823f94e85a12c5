"""One MLflow run: files, tags, metrics, models and traces.

Every call goes through one background thread, in order. What a caller needs no answer to is handed
over and costs microseconds; what went wrong is raised at the next call or at the end.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import mlflow
from mlflow import MlflowClient
from mlflow.entities import AssessmentSource, LoggedModelOutput, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracing.utils.environment import resolve_env_metadata
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE

from posttrain.core.batch import RolloutBatch
from posttrain.core.errors import RunError
from posttrain.core.redaction import redacted
from posttrain.core.tracking.journal import JournalRow, Writer
from posttrain.core.tracking.mlflow_store import entities_of
from posttrain.core.tracking.registry import how_to_load
from posttrain.core.tracking.tables import sample_rows

FinalStatus = Literal["FINISHED", "FAILED", "KILLED"]
Metrics = Mapping[str, float | None]


def measured(metrics: Metrics) -> dict[str, float]:
    present = {name: float(value) for name, value in metrics.items() if value is not None}
    return {name: value for name, value in present.items() if not math.isnan(value)}


def now_ms() -> int:
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class Session:
    client: MlflowClient
    writer: Writer
    uri: str
    experiment_id: str
    journal: Path | None


class MlflowRun:
    """One MLflow run: files, tags, and a single end."""

    def __init__(self, session: Session, run_id: str) -> None:
        self.run_id = run_id
        self.finished = False
        self._session = session

    def log_file(self, path: Path, folder: str = "") -> None:
        """Copy a file, or a folder's content, into the run's artifacts, before this returns."""
        client = self._session.client
        copy = client.log_artifacts if path.is_dir() else client.log_artifact
        self._session.writer.call(
            f"the file {path}", lambda: copy(self.run_id, str(path), folder or None)
        )

    def log_text(self, text: str, artifact_path: str) -> None:
        self._session.writer.submit(
            f"the artifact {artifact_path}",
            lambda: self._session.client.log_text(self.run_id, redacted(text), artifact_path),
        )

    def set_tags(self, tags: Mapping[str, str]) -> None:
        entities = [RunTag(key, redacted(value)) for key, value in tags.items()]
        self._session.writer.submit(
            "tags", lambda: self._session.client.log_batch(self.run_id, tags=entities)
        )

    def rename(self, name: str) -> None:
        """Give the run another name on MLflow's pages."""
        self._session.writer.submit(
            "a run's name", lambda: self._session.client.update_run(self.run_id, name=name)
        )

    def submit_metrics(self, row: JournalRow, model_id: str = "") -> None:
        def write() -> None:  # building the entities costs more than queueing: not on the caller
            self._session.client.log_batch(self.run_id, metrics=entities_of(row, model_id))

        self._session.writer.submit(f"step {row.step}", write)

    def flush(self) -> None:
        """Wait until MLflow has everything handed over so far; raises what went wrong unseen."""
        self._session.writer.flush()

    def end(self, status: FinalStatus) -> None:
        """Flush and end the run. One whose record is incomplete is never shown as FINISHED."""
        writer, client = self._session.writer, self._session.client
        if self.finished:
            return
        self.finished = True
        writer.drain()
        reported: RunError | None = None
        try:
            writer.check()
        except RunError as error:
            reported = error
        shown = "FAILED" if writer.failed and status == "FINISHED" else status
        try:
            writer.call("the end of a run", lambda: client.set_terminated(self.run_id, shown))
        except RunError as error:
            reported = reported or error
        if reported is not None:
            raise reported


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
        tags={
            "posttrain.uri": uri,
            "posttrain.digest": digest,
            MLFLOW_RUN_NOTE: how_to_load(uri),
        },
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


def _environment_metadata() -> dict[str, str]:
    """What MLflow itself adds to every trace, the URL of git's remote among it."""
    return {key: redacted(str(value)) for key, value in resolve_env_metadata().items()}


SOURCE_RUN = "mlflow.sourceRun"
"""The metadata by which MLflow shows a trace among those of a run."""
NAME = "response"


@dataclass(frozen=True, slots=True)
class TracedResponse:
    """A response of a step. `feedback` holds rewards, advantage and verdict by name."""

    step: int
    prompt: str
    response: str
    feedback: Mapping[str, float]
    attributes: Mapping[str, object]
    turns: tuple[str, ...] = ()


def traced_responses(
    batch: RolloutBatch, step: int, component_names: Sequence[str], count: int
) -> list[TracedResponse]:
    """`count` responses of a step: the best and the worst paid first, so that they differ."""
    rows = sample_rows(batch, component_names, len(batch))
    scored = [
        (reward, index)
        for index, row in enumerate(rows)
        if isinstance(reward := row["reward"], float)
        and row["prompt"] is not None
        and row["response"] is not None
    ]
    ranked = [index for _, index in sorted(scored, key=lambda item: (-item[0], item[1]))]
    chosen = [ranked[-1 - i // 2] if i % 2 else ranked[i // 2] for i in range(len(ranked))][:count]
    return [_traced(rows[i], batch.turns[i] if batch.turns else (), step) for i in chosen]


def _traced(row: Mapping[str, object], turns: tuple[str, ...], step: int) -> TracedResponse:
    shown = {"prompt", "response", "reward_detail"}
    feedback = {
        name: float(value)
        for name, value in row.items()
        if isinstance(value, float) and math.isfinite(value)
    }
    rest = {k: v for k, v in row.items() if k not in feedback and k not in shown and v is not None}
    if row.get("reward_detail"):
        rest["reward_detail"] = row["reward_detail"]
    return TracedResponse(
        step,
        str(row["prompt"]),
        str(row["response"]),
        feedback,
        rest,
        turns if len(turns) > 1 else (),
    )


def write_trace(session: Session, run_id: str, traced: TracedResponse) -> str:
    """Write one trace with its feedback, among those of the run; returns the trace's id.

    It is written before this returns: MLflow's own queue would make its feedback wait a second.
    """
    os.environ.setdefault("MLFLOW_ENABLE_ASYNC_TRACE_LOGGING", "false")
    mlflow.set_tracking_uri(session.uri)
    root = mlflow.start_span_no_context(
        NAME,
        span_type="AGENT" if traced.turns else "LLM",
        inputs={"prompt": traced.prompt},
        attributes={k: str(v) for k, v in {"step": traced.step, **traced.attributes}.items()},
        metadata={**_environment_metadata(), SOURCE_RUN: run_id},
        tags={"posttrain.step": str(traced.step)},
        experiment_id=session.experiment_id,
    )
    for number, text in enumerate(traced.turns, start=1):
        turn = mlflow.start_span_no_context(f"turn {number}", span_type="LLM", parent_span=root)
        turn.set_outputs(text)
        turn.end()
    root.set_outputs(traced.response)
    root.end()
    mlflow.flush_trace_async_logging()
    for name, value in traced.feedback.items():
        mlflow.log_feedback(
            trace_id=root.trace_id,
            name=name.replace("/", "."),
            value=value,
            source=AssessmentSource("CODE", "posttrain"),
        )
    return str(root.trace_id)
