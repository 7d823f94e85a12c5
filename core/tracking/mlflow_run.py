"""One MLflow run: files, tags, metrics and traces.

Everything goes through one background thread, in order (`writer`). What a caller needs no answer to
is handed over and costs microseconds; what MLflow refused is raised at the next call or at the end.
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
from mlflow.entities import AssessmentSource
from mlflow.tracing.utils.environment import resolve_env_metadata

from posttrain.core.batch import RolloutBatch
from posttrain.core.errors import RunError
from posttrain.core.redaction import redacted
from posttrain.core.tracking.journal import JournalRow
from posttrain.core.tracking.tables import sample_rows
from posttrain.core.tracking.writer import Writer

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
        self._run_id = run_id
        self.finished = False
        self._session = session

    @property
    def run_id(self) -> str:
        """MLflow's id; a placeholder while the run could not be made there yet."""
        return self._session.writer.real(self._run_id)

    def log_file(self, path: Path, folder: str = "") -> None:
        """Copy a file, or a folder's content, before this returns; it becomes an artifact later."""
        try:
            copy = self._session.writer.spool.keep_file(path)
        except OSError as error:
            raise RunError(
                f"could not record the file {path} in MLflow: {error.strerror or error}"
            ) from error
        self._submit("file", f"the file {path}", file=str(copy), folder=folder)

    def log_text(self, text: str, artifact_path: str) -> None:
        self._submit("text", f"the artifact {artifact_path}", text=text, path=artifact_path)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        self._submit("tags", "tags", tags=dict(tags))

    def share_view(self, name: str, state: str) -> None:
        """Save a layout of charts of the experiment, JSON as MLflow's page makes it."""
        self._submit("view", f"the view {name}", name=name, state=state)

    def rename(self, name: str) -> None:
        """Give the run another name on MLflow's pages."""
        self._submit("name", "a run's name", name=name)

    def submit_metrics(self, row: JournalRow, model_id: str = "") -> None:
        self._submit(
            "metrics",
            f"step {row.step}",
            step=row.step,
            time_ms=row.time_ms,
            metrics=row.metrics,
            model_id=model_id,
        )

    def flush(self) -> None:
        """Wait until everything handed over is in MLflow, or on disk while MLflow is away.

        Raises what went wrong unseen.
        """
        self._session.writer.flush()

    def end(self, status: FinalStatus) -> None:
        """Flush and end the run. One whose record is incomplete is never shown as FINISHED."""
        writer = self._session.writer
        if self.finished:
            return
        self.finished = True
        reported: RunError | None = None
        try:
            writer.flush()
        except RunError as error:
            reported = error
        shown = "FAILED" if writer.failed and status == "FINISHED" else status
        try:
            self._submit("end", "the end of a run", status=shown, ended=now_ms())
            writer.flush()
        except RunError as error:
            reported = reported or error
        if reported is not None:
            raise reported

    def _submit(self, kind: str, what: str, **rest: object) -> None:
        operation = {"op": kind, "what": what, "run": self._run_id, **rest}
        self._session.writer.submit(operation)


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model in a store: its id in the MLflow that it was logged in, where it is, its sha256."""

    model_id: str
    uri: str
    digest: str


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


def write_trace(uri: str, experiment_id: str, run_id: str, traced: TracedResponse) -> str:
    """Write one trace with its feedback, among those of the run; returns the trace's id.

    It is written before this returns: MLflow's own queue would make its feedback wait a second.
    """
    os.environ.setdefault("MLFLOW_ENABLE_ASYNC_TRACE_LOGGING", "false")
    mlflow.set_tracking_uri(uri)
    root = mlflow.start_span_no_context(
        NAME,
        span_type="AGENT" if traced.turns else "LLM",
        inputs={"prompt": traced.prompt},
        attributes={k: str(v) for k, v in {"step": traced.step, **traced.attributes}.items()},
        metadata={**_environment_metadata(), SOURCE_RUN: run_id},
        tags={"posttrain.step": str(traced.step)},
        experiment_id=experiment_id,
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
