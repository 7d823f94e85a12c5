"""The card of a run: what was done, whether it helped, what it cost, as a report."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from mlflow import MlflowClient

from posttrain.core.analysis.report import (
    Cell,
    Link,
    Picture,
    Report,
    Row,
    Table,
    in_words,
    table,
    write_page,
)
from posttrain.core.config.differences import differing_settings
from posttrain.core.config.rl_stage import RL_KINDS
from posttrain.core.redaction import redacted
from posttrain.core.store.artifacts import StageResult
from posttrain.core.tracking.lineage import headline
from posttrain.core.tracking.mlflow_store import connect
from posttrain.pipelines.run.blame import data_read
from posttrain.pipelines.run.pipeline import Pipeline
from posttrain.pipelines.run.summary import evaluations, gain, links, opened_by

WATTS_PER_THREAD, WATTS_PER_GPU = 10.0, 500.0
"""Power that the energy estimate assumes for a busy thread and a busy GPU; not measured."""
NOT_SHOWN = "No difference is shown"
_SHOWN = 60
_SAMPLES = 6


def write_card(
    pipeline: Pipeline, status: str, folder: Path, *, in_mlflow: bool = True
) -> list[Path]:
    """Write `run_card.md` and `run_card.html` to `folder`; what there is of a run that failed.

    Without what only MLflow has, if that is away (`in_mlflow` is False).
    """
    report = card(pipeline, status, in_mlflow=in_mlflow)
    path = folder / "run_card.md"
    path.write_text(redacted(report.markdown()), encoding="utf-8")
    return [path, write_page(folder / "run_card.html", redacted(report.html()))]


MLFLOW_AWAY = "MLflow was away when the run ended: data sets and tokens are not listed here"


def card(pipeline: Pipeline, status: str, *, in_mlflow: bool = True) -> Report:
    """The card as a report."""
    config, results = pipeline.config, pipeline.real_results()
    client = connect(pipeline.tracker.uri) if in_mlflow else None
    notes = [*pipeline.warnings, *([] if in_mlflow else [f"{MLFLOW_AWAY}."])]
    about = (config.description or f"Pipeline {config.name}").rstrip(".")
    ended = {"FINISHED": "finished", "FAILED": "failed"}[status]
    return Report(
        f"Run card: {pipeline.title}",
        [verdict(results, pipeline.baselines), f"{about}; the run {ended}.", *notes],
        [
            Table("What", ["", ""], list(_what(pipeline))),
            evaluations(results.values(), pipeline.baselines),
            table(
                "Stages",
                [_stage(pipeline, result) for result in results.values()],
                "cached: not computed again; digest: sha256 of what the stage made",
            ),
            *_samples(results),
            *_curves(results),
            table(
                "Settings",
                [
                    {"setting": s.place, "default": in_words(s.default), "value": in_words(s.value)}
                    for s in differing_settings(pipeline.resolved, pipeline.manager)[:_SHOWN]
                ],
                "all that are not what the algorithm's preset and the defaults make them",
            ),
            table("Data", list(_data(client, results))),
            Table("Cost", ["", "", "how it is counted"], list(_cost(client, pipeline))),
        ],
    )


def verdict(results: Mapping[str, StageResult], baselines: Mapping[str, str]) -> str:
    """What the last evaluation against a baseline shows, and no more than its interval does."""
    measured = [r for r in results.values() if r.kind == "evaluate"]
    compared = [r for r in measured if "eval/gain_low" in r.metrics]
    if not compared:
        return "Whether the model is better was not measured: no evaluation has a baseline."
    metrics, name = compared[-1].metrics, compared[-1].name
    measures = [("held-out accuracy", "gain"), ("sampled answers", "sampled_gain")]
    found = [
        (_shown(metrics, key), f"{what}, {name}: {gain(metrics, baselines.get(name, ''), key)}")
        for what, key in measures
        if f"eval/{key}_low" in metrics
    ]
    # What is shown comes before what is not; greedy answers before sampled ones.
    found.sort(key=lambda one: one[0] == NOT_SHOWN)
    return " ".join(
        f"{word}: {text}{'; the interval holds 0' if word == NOT_SHOWN else ''}."
        for word, text in found
    )


def _shown(metrics: Mapping[str, float], key: str) -> str:
    if metrics[f"eval/{key}_low"] > 0:
        return "Better"
    return "Worse" if metrics[f"eval/{key}_high"] < 0 else NOT_SHOWN


def _what(pipeline: Pipeline) -> Iterator[list[Cell]]:
    config = pipeline.config
    pages, yours = links(pipeline.result(0.0)), ""
    yield ["run", pipeline.tracker.run_id]
    titles = {"mlflow": "in MLflow", "curves": "curves in MLflow", "prefect": "in Prefect"}
    for name, title in titles.items():
        if name in pages:
            yield [title, Link(pages[name])]
            yours = yours or opened_by(pages, pipeline.home)
    if yours:
        yield ["these pages", yours]
    yield ["records", str(pipeline.record.folder)]
    if config.forked_from is not None:
        origin, at = config.forked_from, f"before stage {config.forked_from.stage}"
        if origin.step is not None:
            at = f"after step {origin.step} of stage {origin.stage}"
        yield ["forked from", f"run {origin.run[:12]}, {at}"]
        yield ["that run in MLflow", Link(pipeline.page_of(origin.run))]
    yield ["base model", f"{config.model.source}, sha256 {pipeline.base.digest[:12]}"]
    yield ["task", config.task.name]
    yield ["seed", str(config.seed)]
    device, dtype = pipeline.runtime.device, str(pipeline.runtime.dtype).removeprefix("torch.")
    yield ["engine, device, precision", f"{pipeline.engines.name}, {device}, {dtype}"]
    for name, stage in config.stages.items():
        algorithm = getattr(stage, "algorithm", None)
        if algorithm is not None:
            yield [f"algorithm of {name}", algorithm.name]


def _stage(pipeline: Pipeline, result: StageResult) -> Row:
    return {
        "stage": result.name,
        "kind": result.kind,
        "status": result.status,
        "reads": ", ".join(pipeline.config.stages[result.name].inputs.values()),
        "result": headline(result.metrics),
        "seconds": round(result.seconds, 1),
        "digest": result.artifacts[0].digest[:12] if result.artifacts else "",
    }


def _curves(results: Mapping[str, StageResult]) -> Iterator[Picture]:
    """The learning curves that stages saved."""
    for result in results.values():
        for item in result.artifacts:
            for path in sorted(item.path.glob("*.png")) if item.kind == "report" else ():
                title = f"{result.name}: {path.stem.replace('_', ' ')}"
                yield Picture(title, path.read_bytes())


def _samples(results: Mapping[str, StageResult]) -> Iterator[Table]:
    """Answers of the last evaluation to its problems: some right ones, some wrong ones."""
    measured = [r for r in results.values() if r.kind == "evaluate"]
    if not measured:
        return
    path = measured[-1].artifact("evaluation").path / "rows.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    right = [row for row in rows if row["greedy_correct"] >= 1]
    wrong = [row for row in rows if row["greedy_correct"] < 1]
    half = _SAMPLES // 2
    chosen = right[: max(half, _SAMPLES - len(wrong))] + wrong[: max(half, _SAMPLES - len(right))]
    yield table(
        "Sample answers",
        [
            {
                "problem": row["problem"]["prompt"],
                "right answer": row["problem"]["answer"],
                "response": row["greedy_text"],
                "correct": row["greedy_correct"] >= 1,
            }
            for row in chosen
        ],
        f"greedy answers in {measured[-1].name}; {len(right)} of {len(rows)} are correct",
    )


def _data(client: MlflowClient | None, results: Mapping[str, StageResult]) -> Iterator[Row]:
    if client is None:
        return
    for result in results.values():
        for data in data_read(client, result.mlflow_run_id):
            yield {
                "stage": result.name,
                "data set": data.name,
                "context": data.context,
                "rows": data.num_rows,
                "sha256": data.sha256[:12],
                "from": data.source,
            }


def _cost(client: MlflowClient | None, pipeline: Pipeline) -> Iterator[list[Cell]]:
    computed = [r for r in pipeline.real_results().values() if r.status != "cached"]
    seconds = sum(result.seconds for result in computed)
    yield ["seconds", round(seconds, 1), "of stages that were computed in this run"]
    peaks = [r.metrics["memory/peak_gb"] for r in computed if "memory/peak_gb" in r.metrics]
    if peaks:
        yield ["peak memory, GB", max(peaks), "of the process, at the end of a step"]
    sampled = 0.0 if client is None else _sum(client, computed, "tokens/response")
    if sampled:
        trained = sampled * max((getattr(s, "epochs", 1) for s in _rl(pipeline)), default=1)
        weights = _weights(pipeline)
        yield ["tokens sampled in training", sampled, "tokens/response of all steps that sample"]
        if weights:
            flops = 2 * weights * sampled + 6 * weights * trained
            how = f"2 x {weights:,} weights a token sampled, 6 x a token trained"
            yield ["FLOPs, rl", flops, how]
    device = pipeline.runtime.device.type
    watts = WATTS_PER_GPU if device == "cuda" else WATTS_PER_THREAD * torch.get_num_threads()
    how = f"{watts:g} W assumed for {device} while stages ran; not measured"
    yield ["energy, Wh", round(seconds * watts / 3600, 2), how]


def _rl(pipeline: Pipeline) -> Iterator[object]:
    return (stage for stage in pipeline.config.stages.values() if stage.kind in RL_KINDS)


def _sum(client: MlflowClient, results: list[StageResult], metric: str) -> float:
    return sum(
        point.value
        for result in results
        if result.kind in RL_KINDS
        for point in client.get_metric_history(result.mlflow_run_id, metric)
    )


def _weights(pipeline: Pipeline) -> int:
    """Weights of the base model, by the headers of its files."""
    from safetensors import safe_open

    total = 0
    for path in pipeline.base.path.glob("*.safetensors"):
        with safe_open(path, framework="pt") as stored:
            shapes = [stored.get_slice(name).get_shape() for name in stored.keys()]  # noqa: SIM118
        total += sum(math.prod(shape) for shape in shapes)
    return total
