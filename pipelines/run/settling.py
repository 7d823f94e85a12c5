"""What comes before a run's first stage and after its last: its round, its gates, its status."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from posttrain.core.errors import ApprovalRefused
from posttrain.core.store.approval import ApprovalNeeded
from posttrain.core.store.artifacts import RunResult
from posttrain.pipelines.run.rounds import Begun

if TYPE_CHECKING:
    from posttrain.pipelines.run.pipeline import Pipeline

NO_NEW_DATA = "no_new_data"
ENDED_TAG = "posttrain.ended"


def nothing_new(begun: Begun, home: Path, seconds: float) -> RunResult:
    """The result of a run that had nothing to do; neither Prefect nor MLflow hear of it."""
    return RunResult(
        run_id="",
        status=NO_NEW_DATA,
        stages={},
        mlflow_uri="",
        mlflow_run_id="",
        mlflow_experiment_id="",
        prefect_flow_run_id="",
        home=home,
        seconds=seconds,
        warnings=(begun.nothing_new,),
    )


def take_up(pipeline: Pipeline, begun: Begun) -> None:
    """Give the pipeline its round's rows, and its base model the id that it has in MLflow."""
    pipeline.rows, pipeline.rows_digest = begun.rows, begun.rows_digest
    tags = {}
    if begun.pinned is not None:
        model_id = begun.pinned.model_id
        pipeline.base = replace(pipeline.base, mlflow_model_id=model_id)
        tags["posttrain.base_version"] = begun.pinned.reported
    if begun.reported:
        tags["posttrain.round"] = begun.reported
        pipeline.reporter.say(begun.reported)
    if tags:
        pipeline.tracker.set_tags(tags)


def settle(pipeline: Pipeline, begun: Begun) -> Literal["FINISHED", "KILLED"]:
    """Finish the round unless an answer is waited for; returns the status for MLflow.

    A model that was rejected ends its round: its rows were trained on. The run is shown as killed
    where a gate held stages back, with the reason in a tag.
    """
    closed = first_closed(pipeline)
    if not isinstance(closed, ApprovalNeeded):
        begun.finish()
    if closed is None:
        return "FINISHED"
    pipeline.tracker.set_tags({ENDED_TAG: str(closed)})
    return "KILLED"


def first_closed(pipeline: Pipeline) -> ApprovalNeeded | ApprovalRefused | None:
    """A gate that was not passed: one that waits before one that refuses."""
    found = sorted(pipeline.closed.values(), key=lambda e: isinstance(e, ApprovalRefused))
    return found[0] if found else None


def raise_if_closed(pipeline: Pipeline) -> None:
    """Raise the error of a gate that was not passed."""
    closed = first_closed(pipeline)
    if closed is not None:
        raise closed
