"""Tables of the steps that a fork shares, so that its pages in MLflow are whole."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.exceptions import MlflowException

from posttrain.core.runtime.files import WrongContent, read_json
from posttrain.core.tracking.mlflow_stage import StageTracker
from posttrain.core.tracking.mlflow_store import TAG_CACHED_FROM, TAG_STAGE
from posttrain.pipelines.run.forks import Parent

FOLDER = "tables"
TAG_RUN = "posttrain.forked_from"
TAG_STEP = "posttrain.forked_step"


def fork_tags(run: str, stage: str, step: int | None) -> dict[str, str]:
    """The tags of a run, and of a stage, that was forked."""
    at = {} if step is None else {TAG_STEP: str(step)}
    return {TAG_RUN: run, "posttrain.forked_stage": stage, **at}


def share_tables(uri: str, parent: Parent, tracker: StageTracker) -> str:
    """Give the stage's run the tables of the shared steps; a sentence where that failed."""
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    try:
        client, known = MlflowClient(tracking_uri=uri), set[str]()
        for run in _stage_runs(client, parent):
            with tempfile.TemporaryDirectory() as folder:
                for name, step, rows in _tables(client, run, parent.fork.step, Path(folder)):
                    if f"{name}/{step}" not in known:
                        known.add(f"{name}/{step}")
                        tracker.log_table(name, step, rows)
    except (MlflowException, OSError, WrongContent) as error:
        return (
            f"the tables of the shared steps are in the run that was forked alone, since MLflow "
            f"did not give them: {' '.join(str(error).split())[:200]}"
        )
    return ""


def _stage_runs(client: MlflowClient, parent: Parent) -> Iterator[Run]:
    """The MLflow runs of the stage that computed some of its steps, the newest first."""
    for record in reversed(parent.runs):
        whole = client.get_run(record.run_id)
        asked = (
            f"tags.`mlflow.parentRunId` = '{record.run_id}' and "
            f"tags.`{TAG_STAGE}` = '{parent.fork.name}'"
        )
        for run in client.search_runs([whole.info.experiment_id], asked):
            if TAG_CACHED_FROM not in run.data.tags:
                yield run


def _tables(
    client: MlflowClient, run: Run, last: int, folder: Path
) -> Iterator[tuple[str, int, list[Mapping[str, object]]]]:
    """Name, step and rows of each table of a step up to `last`."""
    for place in client.list_artifacts(run.info.run_id, FOLDER):
        for file in client.list_artifacts(run.info.run_id, place.path) if place.is_dir else ():
            number = Path(file.path).stem.removeprefix("step-")
            if number.isdecimal() and int(number) <= last:
                path = client.download_artifacts(run.info.run_id, file.path, str(folder))
                yield Path(place.path).name, int(number), _rows(Path(path))


def _rows(path: Path) -> list[Mapping[str, object]]:
    table = read_json(path, dict[str, list[Any]])  # Any: cells, and rows of them
    return [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
