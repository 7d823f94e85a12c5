"""A comparison of runs as a report, and as one JSON object."""

from __future__ import annotations

from dataclasses import asdict

from posttrain.core.compare.curves import Point, point
from posttrain.core.reports.report import Cell, Picture, Report, Table
from posttrain.pipelines.comparing.results import RunResults
from posttrain.pipelines.comparing.runs import Group, RunComparison


def to_json(made: RunComparison) -> dict[str, object]:
    """Groups with their curves, runs with their results, what differs, and the tests."""
    return {
        "groups": [
            {
                "name": group.name,
                "runs": [run.run_id for run in group.runs],
                "seeds": [run.seed for run in group.runs],
                "curves": {
                    metric: [asdict(p) for p in group.curve(metric)] for metric in made.metrics
                },
            }
            for group in made.groups
        ],
        "runs": [
            {
                "run_id": run.run_id,
                "name": run.name,
                "seed": run.seed,
                "stage": run.stage,
                "source": run.source,
                "steps": max(run.rows),
                "seconds": run.seconds,
                "stage_seconds": run.stage_seconds,
                "tokens": run.tokens,
                "evaluation": dict(run.evaluation),
                "last": {metric: run.last(metric) for metric in made.metrics},
            }
            for run in made.runs
        ],
        "differences": [
            {"key": key, "values": dict(zip([r.run_id for r in made.runs], row, strict=True))}
            for key, row in made.changed.items()
        ],
        "tests": [asdict(t) | {"shown": t.shown, "told": t.told()} for t in made.tests],
        "notes": made.notes,
    }


def report_of(made: RunComparison) -> Report:
    """Results first, then what differs, then the curves."""
    title = f"{len(made.runs)} runs in {len(made.groups)} group(s)"
    parts: list[Table | Picture] = [
        _results(made),
        _groups(made),
        _tests(made),
        _differences(made),
        _last(made),
    ]
    return Report(title, made.notes, [*parts, *_pictures(made)])


def _results(made: RunComparison) -> Table:
    rows: list[list[Cell]] = [
        [group.name, run.label, run.name, run.seed, *_of_run(run)]
        for group in made.groups
        for run in group.runs
    ]
    columns = ["group", "run", "name", "seed", "steps", "accuracy", "low", "high", "sampled"]
    columns += ["reward", "KL", "length", "seconds", "stage seconds", "tokens"]
    note = (
        "accuracy: greedy, held out, with its 95 % interval over problems; sampled: share of right "
        "samples; reward, KL (k3, nats per token) and length (tokens) of the last step; seconds "
        "and tokens of all steps; stage seconds: the whole stage, where it was computed"
    )
    return Table("final results", columns, rows, note)


def _of_run(run: RunResults) -> list[Cell]:
    names = ("greedy_accuracy", "greedy_low", "greedy_high", "sampled_accuracy")
    evaluated: list[Cell] = [run.evaluation.get(f"eval/{name}") for name in names]
    last = [run.last(name) for name in ("reward/mean", "kl/ref_k3", "resp_len/mean")]
    return [max(run.rows), *evaluated, *last, run.seconds, run.stage_seconds, run.tokens]


def _groups(made: RunComparison) -> Table:
    rows: list[list[Cell]] = []
    for group in made.groups:
        for name, values in _finals(group).items():
            if values:
                found = point(0, values)
                rows.append([group.name, name, found.num_runs, found.mean, found.low, found.high])
    columns = ["group", "quantity", "runs", "mean", "low", "high"]
    return Table(
        "groups", columns, rows, "mean over seeds, 95 % t-interval; - of one run or equal ones"
    )


def _finals(group: Group) -> dict[str, list[float]]:
    """The final values of each quantity, of the runs that have it."""

    def of(values: list[float | None]) -> list[float]:
        return [value for value in values if value is not None]

    runs = group.runs
    return {
        "held-out accuracy": of([run.evaluation.get("eval/greedy_accuracy") for run in runs]),
        "reward, last step": of([run.last("reward/mean") for run in runs]),
        "KL, last step": of([run.last("kl/ref_k3") for run in runs]),
        "length, last step": of([run.last("resp_len/mean") for run in runs]),
        "seconds": of([run.seconds for run in runs]),
        "tokens": of([run.tokens for run in runs]),
    }


def _tests(made: RunComparison) -> Table:
    rows: list[list[Cell]] = [
        [t.first, t.second, t.how, t.measure, t.told(), t.detail] for t in made.tests
    ]
    columns = ["first", "second", "test", "answers", "verdict", "interval"]
    note = "second minus first, held-out accuracy in points; groups by letter, runs by id"
    return Table("differences, tested", columns, rows, note)


def _differences(made: RunComparison) -> Table:
    rows: list[list[Cell]] = [[key, *values] for key, values in made.changed.items()]
    columns = ["key", *(f"{g.name} {run.label}" for g in made.groups for run in g.runs)]
    return Table("what differs between the configs", columns, rows, "- where it lacks the key")


def _last(made: RunComparison) -> Table:
    rows: list[list[Cell]] = []
    for metric in made.metrics:
        for group in made.groups:
            points = group.curve(metric)
            if points:
                first, last = points[0], points[-1]
                start: list[Cell] = [metric, group.name, first.step, first.mean]
                end: list[Cell] = [last.step, last.mean, last.low, last.high, last.num_runs]
                rows.append(start + end)
    columns = ["metric", "group", "first step", "mean", "last step", "mean at it", "low", "high"]
    return Table("curves, from where to where", [*columns, "runs"], rows)


def _pictures(made: RunComparison) -> list[Table | Picture]:
    from posttrain.core.reports.pictures import Curve, curves

    def drawn(group: Group, points: list[Point]) -> Curve:
        label = f"{group.name} ({len(group.runs)} run{'s' * (len(group.runs) > 1)})"
        return Curve(
            label,
            [p.step for p in points],
            [p.mean for p in points],
            [p.low for p in points],
            [p.high for p in points],
        )

    panels = {
        metric: [drawn(g, points) for g in made.groups if (points := g.curve(metric))]
        for metric in made.metrics
    }
    if not panels:
        return []
    note = "lines: mean over the runs of a group; bands: its 95 % t-interval over seeds"
    return [Picture("learning curves", curves(panels), note)]
