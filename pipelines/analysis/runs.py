"""`compare RUN RUN...`: whole runs, grouped by experiment and tested, as a report.

Results are read from the home and the store. The journal in the home has every step. A stage that
another home computed left none here; then the record in its artifact stands in, which has no times
and no evaluations.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import Any

from posttrain.core.analysis.report import Cell, Picture, Report, Row, Table, table
from posttrain.core.analysis.statistics import (
    AccuracyTest,
    MeasuredRun,
    Outcome,
    Point,
    group_tests,
    mean_curve,
    point,
    read_outcomes,
    sampled_tokens,
)
from posttrain.core.config.base import StageBase
from posttrain.core.config.fork_section import StepStage
from posttrain.core.config.schema import RunConfig
from posttrain.core.errors import ConfigError, ResourceError
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

MAIN_METRICS = (
    "reward/mean",
    "acc/mean",
    "eval/greedy_accuracy",
    "kl/ref_k3",
    "entropy/mean",
    "resp_len/mean",
    "clip/frac",
    "grad/norm",
    "loss/total",
    "token_weight/max",
    "token_weight/p99",
    "token_weight/p50",
    "token_weight/peak",
    "token_weight/effective_frac",
    "token_weight/length_slope",
    "token_weight/share/positive",
    "token_weight/share/bounded",
    "token_weight/share/long",
    "token_weight/share/late",
    "distil/divergence",
    "distil/rollout_kl",
    "sft/loss",
    "loss/preference",
    "rewards/accuracy",
    "rewards/margin",
    "rm/pair_accuracy",
    "rm/margin",
    "rm/held_out_pair_accuracy",
    "pref/held_out_pair_accuracy",
)
"""Those that are compared, where any of the runs has them."""
SAME_EXPERIMENT = frozenset(
    ("seed", "name", "run_name", "description", "keep", "limits", "forked_from", "variants")
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
        seconds=_total(rows, "time/step_s"),
        tokens=_sampled(rows),
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


def _total(rows: Mapping[int, Mapping[str, float]], metric: str) -> float | None:
    values = [row[metric] for row in rows.values() if metric in row]
    return sum(values) if values else None


def _sampled(rows: Mapping[int, Mapping[str, float]]) -> float | None:
    counts = [count for row in rows.values() if (count := sampled_tokens(row)) is not None]
    return sum(counts) if counts else None


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
        return {}, (), (f"run {run.short_id}: the result of stage '{name}' is unusable ({reason})",)
    outcomes = read_outcomes(result.artifact("evaluation").path)
    metrics = json.loads((result.artifact("evaluation").path / "metrics.json").read_text())
    return metrics, tuple(outcomes), ()


def _evaluates(stage: StageBase, trained: str) -> bool:
    return stage.kind == "evaluate" and stage.inputs.get("model") == trained


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


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that differ in nothing but the seed, names, and what was kept."""

    name: str
    runs: tuple[RunResults, ...]

    def curve(self, metric: str) -> list[Point]:
        """The metric by step, over the runs."""
        return mean_curve([run.series(metric) for run in self.runs])


def compare_runs(runs: Sequence[PastRun], stage: str | None) -> Report:
    """Two or more runs; raises `ConfigError` for one given twice, `ResourceError` without steps."""
    ids = [run.record.run_id for run in runs]
    twice = sorted({one for one in ids if ids.count(one) > 1})
    if twice:
        raise ConfigError(f"run {twice[0][:12]} is given twice; name each run once")
    results = [read_results(run, stage) for run in runs]
    groups = _groups(results)
    ordered = [run for group in groups for run in group.runs]
    tests = [test for a, b in combinations(groups, 2) for test in _tests(a, b)]
    notes = [note for run in ordered for note in run.notes]
    notes += _notes(groups, tests)
    metrics = [m for m in MAIN_METRICS if any(run.series(m) for run in ordered)]
    changed = differences([run.config for run in ordered])
    return Report(
        f"{len(ordered)} runs in {len(groups)} group(s)",
        notes,
        [*_tables(groups, changed, tests, metrics), *pictures(groups, metrics)],
        {
            "groups": [_group_values(group, metrics) for group in groups],
            "runs": [_run_values(run, metrics) for run in ordered],
            "differences": [
                {"key": key, "values": dict(zip([r.run_id for r in ordered], row, strict=True))}
                for key, row in changed.items()
            ],
            "tests": [asdict(t) | {"shown": t.shown, "reported": t.describe()} for t in tests],
            "notes": notes,
        },
    )


def _groups(results: Sequence[RunResults]) -> list[Group]:
    found: dict[str, list[RunResults]] = {}
    for run in results:
        found.setdefault(f"{run.stage} {experiment(run.config)}", []).append(run)
    return [
        Group(f"{chr(65 + i)}" if i < 26 else f"G{i + 1}", tuple(group))
        for i, group in enumerate(found.values())
    ]


def _tests(first: Group, second: Group) -> list[AccuracyTest]:
    measured = [
        [found for run in group.runs if (found := run.measured()) is not None]
        for group in (first, second)
    ]
    return group_tests(measured[0], measured[1], (first.name, second.name))


def _notes(groups: Sequence[Group], tests: Sequence[AccuracyTest]) -> list[str]:
    notes = []
    stages = sorted({run.stage for group in groups for run in group.runs})
    if len(stages) > 1:
        notes.append(f"the curves are of different stages: {', '.join(stages)}")
    without = sorted({run.stage for group in groups for run in group.runs if not run.rewarded})
    if without:
        notes.append(
            f"no rewards and no token weights of a policy loss in {', '.join(without)}: what is "
            "compared are the stage's own losses, its held-out answers and its benchmarks"
        )
    if len(groups) == 1:
        notes.append(
            "all runs are of one experiment (they differ in no more than "
            f"{', '.join(SAME_EXPERIMENT)}), so there is no difference to test: the intervals are "
            "the spread over seeds"
        )
    elif not tests:
        notes.append("no two groups have held-out answers, so nothing was tested")
    for run in (run for group in groups for run in group.runs):
        if run.source != "journal":
            notes.append(
                f"run {run.label}: its metrics are from the {run.source}, which has neither times "
                "nor evaluations between steps (another home computed the stage)"
            )
    over_problems = [t for t in tests if t.how != "over seeds"]
    if over_problems:
        notes.append(
            "a test over problems compares these trained models; whether their configs differ "
            "takes two or more seeds of each"
        )
    if len(tests) > 1:
        notes.append(
            f"there are {len(tests)} tests, each with a 95 % interval of its own: of 20 such on "
            "models that do not differ one is expected to miss"
        )
    for group in groups:
        seeds = [run.seed for run in group.runs]
        if len(set(seeds)) < len(seeds):
            notes.append(
                f"group {group.name} has runs of the same seed: they are repetitions, and its "
                "interval over seeds is narrower than it would be"
            )
    return notes


# --- the report ----------------------------------------------------------------------------------


def _group_values(group: Group, metrics: Sequence[str]) -> dict[str, object]:
    return {
        "name": group.name,
        "runs": [run.run_id for run in group.runs],
        "seeds": [run.seed for run in group.runs],
        "curves": {metric: [asdict(p) for p in group.curve(metric)] for metric in metrics},
    }


def _run_values(run: RunResults, metrics: Sequence[str]) -> dict[str, object]:
    fields = ("run_id", "name", "seed", "stage", "source", "seconds", "stage_seconds", "tokens")
    return {name: getattr(run, name) for name in fields} | {
        "steps": max(run.rows),
        "evaluation": dict(run.evaluation),
        "suites": [asdict(metric) | {"key": metric.key} for metric in run.suites],
        "last": {metric: run.last(metric) for metric in metrics},
    }


def _tables(
    groups: Sequence[Group],
    changed: Mapping[str, Sequence[str | None]],
    tests: Sequence[AccuracyTest],
    metrics: Sequence[str],
) -> list[Table]:
    columns = [f"{group.name} {run.label}" for group in groups for run in group.runs]
    return [
        table(
            "final results",
            [{"group": group.name, **_finals(run)} for group in groups for run in group.runs],
            "accuracy: greedy, held out, with its 95 % interval over problems; sampled: share of "
            "right samples; reward, KL (k3, nats per token) and length (tokens) of the last step; "
            "seconds and tokens of all steps; stage seconds: the whole stage in the run that "
            "computed it",
        ),
        table(
            "groups",
            [row for group in groups for row in _group_rows(group)],
            "mean over seeds, 95 % t-interval; - of one run or equal ones",
        ),
        *_suite_tables(groups),
        table(
            "differences, tested",
            [
                {"first": t.first, "second": t.second, "test": t.how, "answers": t.measure}
                | {"verdict": t.describe(), "interval": t.detail}
                for t in tests
            ],
            "second minus first, held-out accuracy in points; groups by letter, runs by id",
        ),
        table(
            "what differs between the configs",
            [{"key": key} | dict(zip(columns, row, strict=True)) for key, row in changed.items()],
            "- where it lacks the key",
        ),
        table(
            "curves, from where to where",
            [
                _ends(metric, group.name, points)
                for metric in metrics
                for group in groups
                if (points := group.curve(metric))
            ],
        ),
    ]


def _finals(run: RunResults) -> dict[str, Cell]:
    return {
        "run": run.label,
        "name": run.name,
        "seed": run.seed,
        "steps": max(run.rows),
        "accuracy": run.evaluation.get("eval/greedy_accuracy"),
        "low": run.evaluation.get("eval/greedy_low"),
        "high": run.evaluation.get("eval/greedy_high"),
        "sampled": run.evaluation.get("eval/sampled_accuracy"),
        "reward": run.last("reward/mean"),
        "KL": run.last("kl/ref_k3"),
        "length": run.last("resp_len/mean"),
        "seconds": run.seconds,
        "stage seconds": run.stage_seconds,
        "tokens": run.tokens,
    }


def _group_rows(group: Group) -> list[Row]:
    """The final values of each quantity, over the runs that have it."""
    rows: list[Row] = []
    for name in ("accuracy", "reward", "KL", "length", "seconds", "tokens"):
        finals = (_finals(run)[name] for run in group.runs)
        values = [value for value in finals if isinstance(value, int | float)]
        if values:
            found = asdict(point(0, values))
            row = {k: found[k] for k in ("num_runs", "mean", "low", "high")}
            rows.append({"group": group.name, "quantity": name} | row)
    return rows


def _suite_tables(groups: Sequence[Group]) -> list[Table]:
    """Benchmarks side by side, a column a run; none where no run has any."""
    runs = [(group.name, run) for group in groups for run in group.runs]
    keys = dict.fromkeys((m.suite, m.task, m.metric) for _, run in runs for m in run.suites)
    rows: list[Row] = []
    for key in keys:
        row: dict[str, Cell] = dict(zip(("suite", "task", "metric"), key, strict=True))
        for name, run in runs:
            own = (m for m in run.suites if (m.suite, m.task, m.metric) == key)
            metric = next(own, None)
            row[f"{name} {run.label}"] = None if metric is None else metric.shown
        rows.append(row)
    note = "value [95 % interval over samples] of the trained model, and the number of samples"
    return [table("benchmarks", rows, note)] if rows else []


def _ends(metric: str, group: str, points: Sequence[Point]) -> Row:
    first, last = points[0], points[-1]
    return {
        "metric": metric,
        "group": group,
        "first step": first.step,
        "mean": first.mean,
        "last step": last.step,
        "mean at it": last.mean,
        "low": last.low,
        "high": last.high,
        "runs": last.num_runs,
    }


def pictures(groups: Sequence[Group], metrics: Sequence[str]) -> list[Picture]:
    """The curves of each metric, the mean of each group with its interval as a band."""
    from posttrain.core.analysis.pictures import Panel, Series, curves

    def drawn(group: Group, points: Sequence[Point]) -> Series:
        label = f"{group.name} ({len(group.runs)} run{'s' * (len(group.runs) > 1)})"
        steps, means = [p.step for p in points], [p.mean for p in points]
        bounds = [p.low for p in points], [p.high for p in points]
        return Series(label, "", steps, means, *bounds, band=True)

    panels = [
        Panel(metric, "", [drawn(g, points) for g in groups if (points := g.curve(metric))])
        for metric in metrics
    ]
    note = "lines: mean over the runs of a group; bands: its 95 % t-interval over seeds"
    return [Picture("learning curves", curves(panels), note)] if panels else []
