"""What a run leaves on its MLflow parent run: summary metrics, plots, lineage, then its status."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from mlflow.exceptions import MlflowException

from posttrain.core.analysis.learning_curves import before_after
from posttrain.core.config.base import BASE_MODEL
from posttrain.core.errors import PosttrainError
from posttrain.core.store.artifacts import StageResult
from posttrain.core.tracking.lineage import LineageNode, headline, lineage_html
from posttrain.core.tracking.metric_names import HEADLINES
from posttrain.core.tracking.outage import PATIENCE_S
from posttrain.pipelines.run.card import write_card
from posttrain.pipelines.run.pipeline import Pipeline, algorithms_of, origin_of
from posttrain.pipelines.run.progress import FileReporter
from posttrain.pipelines.run.summary import prefect_page


def close_run(
    pipeline: Pipeline, status: Literal["FINISHED", "FAILED", "KILLED"], log: FileReporter
) -> None:
    """Write the summary of what finished and the run's log, then end the run with `status`."""
    if status != "KILLED" and (left := pipeline.store.settle(PATIENCE_S)):
        pipeline.warn(left)
    log.close()
    try:
        pipeline.tracker.log_file(log.path)
        if pipeline.results:
            with tempfile.TemporaryDirectory() as folder:
                _write_summary(pipeline, Path(folder))
        if status != "KILLED":  # such a run goes on later, and has to end at once
            in_mlflow = pipeline.tracker.wait(PATIENCE_S)
            _leave_card(pipeline, status, log.path.parent, in_mlflow=in_mlflow)
    finally:
        left = pipeline.tracker.finish(status)
        pipeline.report_outages()
        if left:
            pipeline.warn(left)


def _leave_card(
    pipeline: Pipeline, status: Literal["FINISHED", "FAILED"], folder: Path, *, in_mlflow: bool
) -> None:
    """The run's card in its folder and in MLflow; a run without one is a run all the same."""
    try:
        for path in write_card(pipeline, status, folder, in_mlflow=in_mlflow):
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
        # Runs of one config and seed differ in what they reached: the list of runs, which has
        # room for some twenty characters of a name, shows it.
        reached = f"{algorithms_of(pipeline.config)} {100 * bars[-1][1]:.1f} %".strip()
        tracker.rename(f"{reached} {pipeline.title}")
    tracker.log_metrics(last_results(results))
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
            *(["", origin] if (origin := origin_of(pipeline)) else []),
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


def last_results(results: Mapping[str, StageResult]) -> dict[str, float]:
    """Reward and accuracies of the last stages that measured them, under the same names in every
    run, so that MLflow's list of runs has one column for each.
    """
    found: dict[str, float] = {}
    for result in results.values():
        found |= {HEADLINES[k]: v for k, v in result.metrics.items() if k in HEADLINES}
    return found


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
