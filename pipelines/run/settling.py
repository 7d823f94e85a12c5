"""Before a run's first stage and after its last: its round, its gates, its status, its records."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from mlflow.exceptions import MlflowException

from posttrain.core.analysis.learning_curves import before_after
from posttrain.core.config.base import BASE_MODEL
from posttrain.core.errors import ApprovalRefused, PosttrainError
from posttrain.core.store.approval import ApprovalNeeded
from posttrain.core.store.artifacts import RunResult, StageResult
from posttrain.core.tracking.lineage import LineageNode, headline, lineage_html
from posttrain.pipelines.run.card import write_card
from posttrain.pipelines.run.pipeline import Pipeline
from posttrain.pipelines.run.progress import FileReporter
from posttrain.pipelines.run.rounds import Begun
from posttrain.pipelines.run.summary import prefect_page

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


def close_run(
    pipeline: Pipeline, status: Literal["FINISHED", "FAILED", "KILLED"], log: FileReporter
) -> None:
    """Write the summary of what finished and the run's log, then end the run with `status`."""
    log.close()
    try:
        pipeline.tracker.log_file(log.path)
        if pipeline.results:
            with tempfile.TemporaryDirectory() as folder:
                _write_summary(pipeline, Path(folder))
        if status != "KILLED":  # such a run goes on later, and has to end at once
            _leave_card(pipeline, status, log.path.parent)
    finally:
        pipeline.tracker.finish(status)


def _leave_card(pipeline: Pipeline, status: Literal["FINISHED", "FAILED"], folder: Path) -> None:
    """The run's card in its folder and in MLflow; a run without one is a run all the same."""
    try:
        for path in write_card(pipeline, status, folder):
            pipeline.tracker.log_file(path)
    except (PosttrainError, MlflowException, OSError) as error:
        pipeline.reporter.warn(f"the run card could not be written: {error}")


def _write_summary(pipeline: Pipeline, folder: Path) -> None:
    tracker, results = pipeline.tracker, pipeline.results
    bars = accuracies(results)
    if bars:
        title = f"{pipeline.config.name}: held-out greedy accuracy"
        tracker.log_file(before_after(bars, title, folder), "summary")
        tracker.set_tags({"mlflow.note.content": note(pipeline, bars)})
    nodes = lineage_nodes(pipeline)
    (folder / "lineage.html").write_text(lineage_html(nodes))
    tracker.log_file(folder / "lineage.html", "summary")
    for result in results.values():
        tracker.log_metrics({f"{result.name}/{k}": v for k, v in headline_metrics(result).items()})


def note(pipeline: Pipeline, bars: Sequence[tuple[str, float, float, float]]) -> str:
    """The description on top of the run's page, in Markdown."""
    rows = [
        f"| {n} | {100 * a:.1f} % | {100 * lo:.1f} to {100 * hi:.1f} % |" for n, a, lo, hi in bars
    ]
    flow = pipeline.prefect_flow_run_id
    return "\n".join(
        [
            pipeline.config.description or f"Pipeline `{pipeline.config.name}`.",
            "",
            "| evaluation | held-out accuracy | 95 % interval |",
            "|---|---|---|",
            *rows,
            "",
            "All of it: Artifacts > `run_card.html`. Pictures: `summary` there; `plots` and "
            "`tables` in the child runs.",
            *(["", f"[The run in Prefect]({prefect_page(flow)})"] if flow else []),
        ]
    )


def accuracies(results: Mapping[str, StageResult]) -> list[tuple[str, float, float, float]]:
    """(stage, greedy accuracy, low, high) of every evaluation, in order."""
    return [
        (
            result.name,
            result.metrics["eval/greedy_accuracy"],
            result.metrics["eval/greedy_low"],
            result.metrics["eval/greedy_high"],
        )
        for result in results.values()
        if result.kind == "evaluate"
    ]


def headline_metrics(result: StageResult) -> dict[str, float]:
    """What of a stage belongs on the pipeline's own run."""
    if result.kind == "register":
        return {}
    prefixes = ("eval/", "rm/held_out", "pref/held_out", "promote/", "approve/")
    return {k: v for k, v in result.metrics.items() if k.startswith(prefixes)}


def lineage_nodes(pipeline: Pipeline) -> list[LineageNode]:
    """The base model and every finished stage, with digests and main results."""
    nodes = [LineageNode(BASE_MODEL, "base", {}, pipeline.base.digest, "", "")]
    for name, result in pipeline.results.items():
        stage = pipeline.config.stages[name]
        digest = result.artifacts[0].digest if result.artifacts else ""
        nodes.append(
            LineageNode(
                name, result.kind, stage.inputs, digest, headline(result.metrics), result.status
            )
        )
    return nodes
