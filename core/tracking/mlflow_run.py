"""One MLflow run of a pipeline: files, tags, metrics, and a single end.

Every call goes through one background thread, in order. What a caller needs no answer to is handed
over and costs microseconds; what went wrong is raised at the next call or at the end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlflow import MlflowClient
from mlflow.entities import Metric, RunTag

from posttrain.core.errors import RunError
from posttrain.core.tracking.journal import JournalRow
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
            lambda: self._session.client.log_text(self.run_id, text, artifact_path),
        )

    def set_tags(self, tags: Mapping[str, str]) -> None:
        entities = [RunTag(key, value) for key, value in tags.items()]
        self._session.writer.submit(
            "tags", lambda: self._session.client.log_batch(self.run_id, tags=entities)
        )

    def submit_metrics(self, row: JournalRow, model_id: str = "") -> None:
        def write() -> None:  # building the entities costs more than queueing: not on the caller
            entities = [
                Metric(name, value, row.time_ms, row.step, model_id=model_id or None)
                for name, value in row.metrics.items()
            ]
            self._session.client.log_batch(self.run_id, metrics=entities)

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
        told: RunError | None = None
        try:
            writer.check()
        except RunError as error:
            told = error
        shown = "FAILED" if writer.failed and status == "FINISHED" else status
        try:
            writer.call("the end of a run", lambda: client.set_terminated(self.run_id, shown))
        except RunError as error:
            told = told or error
        if told is not None:
            raise told
