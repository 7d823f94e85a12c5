"""What a run came to, read from the home and the store alone: curves, evaluation, costs.

The journal in the home has every step. A stage that another home computed left none here; then the
record in its artifact stands in, which has no times and no evaluations.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from posttrain.core.artifacts import read_manifest
from posttrain.core.compare.configs import flatten
from posttrain.core.compare.significance import MeasuredRun
from posttrain.core.comparison import Outcome, read_outcomes
from posttrain.core.config.base import StageBase
from posttrain.core.config.dag import stage_kind
from posttrain.core.errors import ResourceError, RunError
from posttrain.core.tracking.journal import journal_path, read_journal
from posttrain.core.training.step_record import FOLDER, read_record
from posttrain.pipelines.comparing.past_run import PastRun
from posttrain.pipelines.replay.sources import choose_stage


@dataclass(frozen=True, slots=True)
class RunResults:
    """A run with the stage whose curves are compared. `rows` are the metrics of each step.

    `seconds` and `tokens` are sums over the steps, None where they were not kept; `stage_seconds`
    is what the whole stage took in the run that computed it, None while it is not done.
    `evaluation` are the metrics of the stage that evaluated the trained model, `outcomes` its
    answers.
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

    @property
    def label(self) -> str:
        """Enough of the id to tell runs apart."""
        return self.run_id[:8]

    def series(self, metric: str) -> dict[int, float]:
        """The metric by step, where it was measured."""
        return {step: row[metric] for step, row in self.rows.items() if metric in row}

    def last(self, metric: str) -> float | None:
        """Its value at the last step that has one."""
        found = self.series(metric)
        return found[max(found)] if found else None

    def measured(self) -> MeasuredRun | None:
        """Its held-out answers, if there are some."""
        return MeasuredRun(self.label, self.seed, self.outcomes) if self.outcomes else None


def read_results(run: PastRun, stage: str | None) -> RunResults:
    """Everything of one run; raises `ResourceError` where no step's metrics are kept."""
    config = run.resolved.config
    name = choose_stage(run.resolved, stage)
    rows, source = _rows(run, name)
    evaluation, outcomes, notes = _evaluation(run, name)
    manifest = read_manifest(run.store.folder(name, run.record.stages[name]))
    return RunResults(
        run_id=run.record.run_id,
        name=run.record.name,
        seed=config.seed,
        stage=name,
        config=flatten(config.model_dump(mode="json")),
        rows=rows,
        source=source,
        seconds=_total(rows, "time/step_s"),
        tokens=_total(rows, "tokens/response"),
        stage_seconds=None if manifest is None else float(manifest["seconds"]),
        evaluation=evaluation,
        outcomes=outcomes,
        notes=notes,
    )


def _rows(run: PastRun, stage: str) -> tuple[dict[int, Mapping[str, float]], str]:
    identity = run.record.stages.get(stage)
    if identity is None:
        raise ResourceError(
            f"stage '{stage}' never began in run {run.short_id}; the same `posttrain run` command "
            "goes on with the run"
        )
    path = journal_path(run.home / "runs", stage, identity)
    rows: dict[int, Mapping[str, float]] = {}
    try:
        for row in read_journal(path):
            rows[row.step] = {**rows.get(row.step, {}), **row.metrics}
    except (KeyError, TypeError, UnicodeDecodeError) as error:
        raise RunError(
            f"{path} is not the journal that a run wrote ({error}): it was changed; compute the "
            "stage again with --no-cache"
        ) from error
    if rows:
        return rows, "journal"
    record = run.store.folder(stage, identity) / FOLDER
    rows = {step: found.metrics for step, found in read_record(record).items()}
    if rows:
        return rows, "record of steps in the store"
    raise ResourceError(
        f"no step of stage '{stage}' of run {run.short_id} is on record: neither {path} nor "
        f"{record} is there; compare runs of the home that computed them, or compute the stage "
        "again with --no-cache"
    )


def _total(rows: Mapping[int, Mapping[str, float]], metric: str) -> float | None:
    values = [row[metric] for row in rows.values() if metric in row]
    return sum(values) if values else None


def _evaluation(
    run: PastRun, trained: str
) -> tuple[dict[str, float], tuple[Outcome, ...], tuple[str, ...]]:
    """Of the last stage that evaluated what `trained` made."""
    stages = run.resolved.config.stages
    evaluating = [n for n in run.resolved.order if _evaluates(stages[n], trained)]
    if not evaluating:
        return {}, (), (f"run {run.short_id}: no stage evaluates the model of '{trained}'",)
    name = evaluating[-1]
    result, reason = run.store.lookup(name, run.record.stages.get(name, ""))
    if result is None:
        told = f"run {run.short_id}: the result of stage '{name}' cannot be used ({reason})"
        return {}, (), (told,)
    outcomes = read_outcomes(result.artifact("evaluation").path)
    metrics = json.loads((result.artifact("evaluation").path / "metrics.json").read_text())
    return metrics, tuple(outcomes), ()


def _evaluates(stage: StageBase, trained: str) -> bool:
    return stage_kind(stage) == "evaluate" and stage.inputs.get("model") == trained
