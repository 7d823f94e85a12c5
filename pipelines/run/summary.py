"""The summary of a finished run: accuracies, stages, artifacts, links."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.core.analysis.report import Table, show_table, table, table_markdown
from posttrain.core.config.rl_stage import RL_KINDS
from posttrain.core.errors import PosttrainError
from posttrain.core.redaction import address, redacted
from posttrain.core.store.artifacts import RunResult, StageResult
from posttrain.core.store.run_record import find_run
from posttrain.core.tracking import shared_view
from posttrain.pipelines.run.progress import describe, duration

if TYPE_CHECKING:
    from rich.console import Console


UI_MLFLOW = "http://127.0.0.1:5000"
UI_PREFECT = "http://127.0.0.1:4200"
TRAINING_VIEW = "workflowType=machine_learning"
"""Without it MLflow's pages open as those of an application that calls a language model."""


def links(result: RunResult) -> dict[str, str]:
    """Deep links to the run, on the servers it reported to.

    A run in the home's own databases is shown by `posttrain ui`.
    """
    remote = result.mlflow_uri.startswith(("http://", "https://"))
    base = address(result.mlflow_uri).rstrip("/") if remote else UI_MLFLOW
    found = {}
    if result.mlflow_run_id:
        place = f"experiments/{result.mlflow_experiment_id}/runs/{result.mlflow_run_id}"
        found["mlflow"] = f"{base}/#/{place}?{TRAINING_VIEW}"
        # A stage that was computed here has saved the view.
        computed = [s.kind for s in result.stages.values() if s.status != "cached"]
        if kinds := [kind for kind in computed if kind in RL_KINDS]:
            view = shared_view.name_of(kinds[-1])
            curves = shared_view.place(result.mlflow_experiment_id, view)
            found["curves"] = f"{base}/#/{curves}&{TRAINING_VIEW}"
    if result.prefect_flow_run_id:
        found["prefect"] = prefect_page(result.prefect_flow_run_id)
    return found


def opened_by(pages: Mapping[str, str], home: Path) -> str:
    """How to open pages that no server of the run's shows; empty if there are none."""
    ours = any(page.startswith((UI_MLFLOW, UI_PREFECT)) for page in pages.values())
    return f"open the links with: posttrain ui --home {home}" if ours else ""


def prefect_page(flow_run_id: str) -> str:
    """The page of a flow run, on the server in use or on that of `posttrain ui`."""
    api = address(os.environ.get("PREFECT_API_URL", "")).rstrip("/")
    return f"{api.removesuffix('/api') or UI_PREFECT}/runs/flow-run/{flow_run_id}"


def to_json(result: RunResult) -> dict[str, object]:
    """The run as one JSON object, the last line of `posttrain run --json`."""
    return {
        "run_id": result.run_id,
        "status": result.status,
        "stages": {name: _stage_json(stage) for name, stage in result.stages.items()},
        "mlflow_uri": redacted(result.mlflow_uri),
        "mlflow_run_id": result.mlflow_run_id,
        "mlflow_experiment_id": result.mlflow_experiment_id,
        "prefect_flow_run_id": result.prefect_flow_run_id,
        "home": str(result.home),
        "seconds": result.seconds,
        "links": links(result),
        "warnings": list(result.warnings),
    }


def _stage_json(stage: StageResult) -> dict[str, object]:
    return {
        "status": stage.status,
        "kind": stage.kind,
        "seconds": stage.seconds,
        "artifacts": [
            {"kind": item.kind, "uri": item.uri, "digest": item.digest} for item in stage.artifacts
        ],
        "metrics": dict(stage.metrics),
        "mlflow_run_id": stage.mlflow_run_id,
    }


def with_interval(metrics: Mapping[str, float], name: str) -> str:
    """`61.5 % [54.6, 68.0]` of `eval/<name>_accuracy`, or a dash when it was not measured."""
    value = metrics.get(f"eval/{name}_accuracy")
    if value is None:
        return "-"
    low, high = metrics.get(f"eval/{name}_low"), metrics.get(f"eval/{name}_high")
    interval = "" if low is None or high is None else f" [{low * 100:.1f}, {high * 100:.1f}]"
    return f"{value * 100:.1f} %{interval}"


def pass_sizes(evaluations: Iterable[Mapping[str, float]]) -> list[int]:
    """The k of every pass@k that an evaluation measured, in order."""
    prefix = "eval/pass_at/"
    names = {name for metrics in evaluations for name in metrics if name.startswith(prefix)}
    return sorted(int(name.removeprefix(prefix)) for name in names)


def with_error(metrics: Mapping[str, float], name: str, error: str) -> str:
    """`61.5 % +- 3.1` of `eval/<name>` and its standard error, or a dash."""
    value, spread = metrics.get(f"eval/{name}"), metrics.get(f"eval/{error}")
    if value is None:
        return "-"
    return f"{value * 100:.1f} %" + ("" if spread is None else f" +- {spread * 100:.1f}")


def gain(metrics: Mapping[str, float], baseline: str = "", name: str = "gain") -> str:
    """`+12.0 points [+5.1, +18.9] over evaluate_sft`, or a dash where there is no baseline.

    `name` is `gain`, of greedy accuracy, or `sampled_gain`.
    """
    value = metrics.get(f"eval/{name}")
    if value is None:
        return "-"
    low, high = metrics.get(f"eval/{name}_low"), metrics.get(f"eval/{name}_high")
    interval = "" if low is None or high is None else f" [{low * 100:+.1f}, {high * 100:+.1f}]"
    over = f" over {baseline}" if baseline else ""
    return f"{value * 100:+.1f} points{interval}{over}"


def evaluations(stages: Iterable[StageResult], baselines: Mapping[str, str]) -> Table:
    """Held-out accuracies of the stages that measured them."""
    measured = {stage.name: stage.metrics for stage in stages if stage.kind == "evaluate"}
    sizes = pass_sizes(measured.values())
    found = {name for metrics in measured.values() for name in metrics}
    shown = [n for n in ("pass", "maj", "rm") if any(f"eval/{n}_at/{k}" in found for k in sizes)]
    return table(
        "Held-out accuracy, 95 % intervals",
        [
            {
                "evaluation": name,
                "greedy": with_interval(metrics, "greedy"),
                "sampled": with_interval(metrics, "sampled"),
                **{
                    f"{name}@{k}": with_error(metrics, f"{name}_at/{k}", f"{name}_at_se/{k}")
                    for name in shown
                    for k in sizes
                },
                "gain over baseline": gain(metrics, baselines.get(name, "")),
                "sampled gain": gain(metrics, "", "sampled_gain"),
            }
            for name, metrics in measured.items()
        ]
        + [
            {"evaluation": f"{name}: {label}", "greedy": with_interval(own, "greedy")}
            for name, metrics in measured.items()
            for label, own in _of_tasks(metrics).items()
        ],
    )


def _of_tasks(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """The greedy accuracy and its interval on each task of a mixture, named as those of all."""
    prefix = "eval/task_accuracy/"
    labels = [name.removeprefix(prefix) for name in metrics if name.startswith(prefix)]
    return {
        label: {
            f"eval/greedy_{what}": metrics[f"eval/task_{what}/{label}"]
            for what in ("accuracy", "low", "high")
        }
        for label in labels
    }


def _stages(result: RunResult) -> Table:
    return table(
        "Stages",
        [
            {
                "stage": stage.name,
                "kind": stage.kind,
                "status": stage.status,
                "time": duration(stage.seconds),
                "result": describe(stage.metrics),
            }
            for stage in result.stages.values()
        ],
    )


def print_summary(result: RunResult, console: Console) -> None:
    """Print the tables, the artifacts and the links of `result`."""
    if not result.stages:  # there was nothing to do, as was said
        return
    accuracies = evaluations(result.stages.values(), result.baselines)
    for found in (*([accuracies] if accuracies.rows else []), _stages(result)):
        show_table(found, console)
    lines = [
        f"{item.kind:<14} {item.uri}"
        for stage in result.stages.values()
        for item in stage.artifacts
    ]
    lines += [f"warning: {text}" for text in result.warnings]
    addresses = links(result)
    lines += [f"{name:<14} {link}" for name, link in addresses.items()]
    how = opened_by(addresses, result.home)
    ended = f"run {result.run_id}: {result.status} in {duration(result.seconds)}"
    lines.append(f"{ended}; {how}" if how else ended)
    for line in lines:  # never wrapped, so that paths and links can be copied
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def next_commands(result: RunResult, options: Sequence[str]) -> list[str]:
    """Three commands to go on with: talk to the last model, export it, look at the run.

    `options` are those with which a command finds the run. Empty for a run that made no model.
    """
    made = [i for stage in result.stages.values() for i in stage.artifacts if i.kind == "model"]
    if not made:
        return []
    run, given = result.run_id[:12], shlex.join(options)
    other = _other_run(result)
    look = f"posttrain compare {other} {run}" if other else "posttrain ui"
    found = [f"posttrain chat {run}", f"posttrain export {run} ./{made[-1].stage}-model", look]
    return [f"{command} {given}".strip() for command in found]


def _other_run(result: RunResult) -> str:
    """The run before this one with the same name and stages, to compare it with."""
    here = find_run(result.home, result.run_id)
    runs = [p.parent.name for p in (result.home / "runs").glob("*/run.json")]
    others = []
    for run in runs:
        with contextlib.suppress(PosttrainError):  # of a record that cannot be read
            others.append(find_run(result.home, run))
    alike = [
        other
        for other in others
        if (other.name, other.stages.keys()) == (here.name, here.stages.keys())
        and other.stages != here.stages
    ]
    return max(alike, key=lambda run: run.began).run_id[:12] if alike else ""


def summary_markdown(result: RunResult) -> str:
    """Stages with their main metrics as a table, then artifacts and warnings."""
    made = [
        f"- {item.kind} of {stage.name}: `{item.uri}`"
        for stage in result.stages.values()
        for item in stage.artifacts
    ]
    warnings = [f"- warning: {text}" for text in result.warnings]
    return "\n".join([table_markdown(_stages(result)), "", *made, *warnings])
