"""What a run left behind: metrics of each step, held-out answers, benchmarks, its config.

Results are read from the home and the store. The journal in the home has every step. A stage that
another home computed left none here; then the record in its artifact stands in, which has no times
and no evaluations.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.core.analysis.statistics import (
    MeasuredRun,
    Outcome,
    read_outcomes,
    sampled_tokens,
)
from posttrain.core.config.fork_section import StepStage
from posttrain.core.config.schema import RunConfig
from posttrain.core.errors import ResourceError
from posttrain.core.evaluation.suites import (
    EVALUATIONS,
    SUITES,
    SuiteMetric,
    read_suites,
)
from posttrain.core.store.manifests import read_manifest
from posttrain.core.tracking.journal import journal_path, read_journal
from posttrain.core.training.step_record import FOLDER, read_record
from posttrain.pipelines.analysis.past_run import PastRun

SAME_EXPERIMENT = (
    "seed",
    "name",
    "run_name",
    "description",
    "keep",
    "limits",
    "forked_from",
    "variants",
)
"""Top-level keys in which runs of one experiment may differ: the draw, names, what is kept."""


@dataclass(frozen=True, slots=True)
class RunResults:
    """A run with the stage whose curves are compared. `rows` are the metrics of each step.

    `seconds` and `tokens` are sums over the steps, None where they were not kept; `stage_seconds`
    is what the whole stage took in the run that computed it, None while it is not done.
    `evaluation` are the metrics of the stage that evaluated the trained model, `outcomes` its
    answers; `suites` are the newest results of each benchmark of that model.
    """

    run_id: str
    name: str
    seed: int
    stage: str
    config: Mapping[str, str]
    rows: Mapping[int, Mapping[str, float]]
    source: str
    seconds: float | None
    tokens: float | None
    stage_seconds: float | None
    evaluation: Mapping[str, float] = field(default_factory=dict)
    outcomes: tuple[Outcome, ...] = ()
    notes: tuple[str, ...] = ()
    suites: tuple[SuiteMetric, ...] = ()

    @property
    def label(self) -> str:
        """Enough of the id to distinguish runs."""
        return self.run_id[:8]

    def series(self, metric: str) -> dict[int, float]:
        """The metric by step, where it was measured."""
        return {step: row[metric] for step, row in self.rows.items() if metric in row}

    def last(self, metric: str) -> float | None:
        """Its value at the last step that has one."""
        found = self.series(metric)
        return found[max(found)] if found else None

    @property
    def rewarded(self) -> bool:
        """Whether some step has rewards, or weights of a policy loss."""
        return any(self.series(name) for name in ("reward/mean", "token_weight/max"))

    def measured(self) -> MeasuredRun | None:
        """Its held-out answers, if there are some."""
        return MeasuredRun(self.label, self.seed, self.outcomes) if self.outcomes else None


def _seed(config: RunConfig, name: str) -> int:
    """The seed of what the stage drew: the fork's, where it has one of its own."""
    stage = config.stages[name]
    fork = stage.fork if isinstance(stage, StepStage) else None
    return config.seed if fork is None or fork.seed is None else fork.seed


def read_results(run: PastRun, stage: str | None) -> RunResults:
    """Everything of one run; raises `ResourceError` where no step's metrics are kept."""
    config = run.resolved.config
    name = run.training_stage(stage)
    rows, source = step_rows(run, name)
    evaluation, outcomes, notes = _evaluation(run, name)
    manifest = read_manifest(run.store.fetched(name, run.record.stages[name]))
    return RunResults(
        run_id=run.record.run_id,
        name=run.record.name,
        seed=_seed(config, name),
        stage=name,
        config=flatten(config.model_dump(mode="json")),
        rows=rows,
        source=source,
        seconds=_total(row.get("time/step_s") for row in rows.values()),
        tokens=_total(map(sampled_tokens, rows.values())),
        stage_seconds=None if manifest is None else float(manifest["seconds"]),
        evaluation=evaluation,
        outcomes=outcomes,
        notes=notes,
        suites=suite_results(run, name, manifest),
    )


def suite_results(
    run: PastRun, trained: str, manifest: Mapping[str, Any] | None
) -> tuple[SuiteMetric, ...]:
    """Benchmarks of the model that `trained` made: by `posttrain eval` and by stages of the run.

    They are found by the model's digest. Of a metric that was measured several times, the newest.
    """
    if manifest is None:
        return ()
    digests = {item["digest"] for item in manifest["artifacts"] if item["kind"] == "model"}
    folders = sorted((run.home / EVALUATIONS).glob("[!.]*"))
    stages = run.resolved.config.stages
    folders = [
        run.store.fetched(name, run.record.stages[name]) / SUITES
        for name in run.resolved.order
        if name in run.record.stages and stages[name].inputs.get("model") == trained
    ] + folders
    found: dict[str, SuiteMetric] = {}
    for stored in map(read_suites, folders):
        if stored is not None and stored.digest in digests:
            found.update({metric.key: metric for metric in stored.metrics})
    return tuple(found.values())


def step_rows(run: PastRun, stage: str) -> tuple[dict[int, Mapping[str, float]], str]:
    """The metrics of each step of a stage, and where they were kept; `ResourceError` if nowhere."""
    identity = run.identity(stage)
    path = journal_path(run.home / "runs", stage, identity)
    rows: dict[int, Mapping[str, float]] = {}
    for row in read_journal(path):
        rows[row.step] = {**rows.get(row.step, {}), **row.metrics}
    if rows:
        return rows, "journal"
    record = run.store.fetched(stage, identity) / FOLDER
    rows = {step: found.metrics for step, found in read_record(record).items()}
    if rows:
        return rows, "record of steps in the store"
    raise ResourceError(
        f"no step of stage '{stage}' of run {run.short_id} is on record: neither {path} nor "
        f"{record} is there; compare runs of the home that computed them, or compute the stage "
        "again with --no-cache"
    )


def _total(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _evaluation(
    run: PastRun, trained: str
) -> tuple[dict[str, float], tuple[Outcome, ...], tuple[str, ...]]:
    """Of the last stage that evaluated what `trained` made."""
    stages = run.resolved.config.stages
    reading = [n for n in run.resolved.order if stages[n].inputs.get("model") == trained]
    evaluating = [name for name in reading if stages[name].kind == "evaluate"]
    if not evaluating:
        return {}, (), (f"run {run.short_id}: no stage evaluates the model of '{trained}'",)
    name = evaluating[-1]
    result, reason = run.store.lookup(name, run.record.stages.get(name, ""))
    if result is None:
        return {}, (), (f"run {run.short_id}: the result of stage '{name}' is unusable ({reason})",)
    folder = result.artifact("evaluation").path
    metrics = json.loads((folder / "metrics.json").read_text())
    return metrics, tuple(read_outcomes(folder)), ()


def flatten(values: Mapping[str, Any]) -> dict[str, str]:
    """Nested values (Any: YAML) as `a.b.0.c` to JSON text; an empty mapping or list is a value."""
    found: dict[str, str] = {}

    def walk(place: str, value: Any) -> None:  # Any: YAML
        inside: list[tuple[str, Any]] = []
        if isinstance(value, Mapping):
            inside = [(str(key), item) for key, item in value.items()]
        elif isinstance(value, list | tuple) and any(isinstance(i, Mapping) for i in value):
            inside = [(str(number), item) for number, item in enumerate(value)]
        if not inside:
            found[place] = json.dumps(value, default=str)
        for key, item in inside:
            walk(f"{place}.{key}" if place else key, item)

    walk("", values)
    return found


def differences(configs: Sequence[Mapping[str, str]]) -> dict[str, list[str | None]]:
    """Keys whose values are not all the same, with each config's value; None where it has none."""
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = {key: [config.get(key) for config in configs] for key in keys}
    return {key: row for key, row in rows.items() if len(set(row)) > 1}


def experiment(config: Mapping[str, str]) -> str:
    """What two runs of one experiment have in common, as text to compare."""
    kept = {k: v for k, v in config.items() if k.partition(".")[0] not in SAME_EXPERIMENT}
    kept = {k: v for k, v in kept.items() if not k.endswith(".fork.seed")}
    return json.dumps(kept, sort_keys=True)
