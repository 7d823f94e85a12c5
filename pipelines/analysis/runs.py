"""`compare RUN RUN...`: whole runs, grouped by experiment and tested, as a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations

from posttrain.core.analysis.report import Cell, Picture, Report, Row, Table, table
from posttrain.core.analysis.statistics import (
    AccuracyTest,
    Point,
    group_tests,
    mean_curve,
    point,
)
from posttrain.core.errors import ConfigError
from posttrain.pipelines.analysis.past_run import PastRun
from posttrain.pipelines.analysis.run_results import (
    SAME_EXPERIMENT,
    RunResults,
    differences,
    experiment,
    read_results,
)

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
