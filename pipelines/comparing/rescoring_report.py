"""A rescoring as a report, and as one JSON object."""

from __future__ import annotations

from dataclasses import asdict

from posttrain.core.reports.report import Cell, Picture, Report, Table, shortened
from posttrain.core.rescoring.scores import ScoreDistribution
from posttrain.pipelines.comparing.rescoring import RescoredStep, Rescoring


def to_json(made: Rescoring) -> dict[str, object]:
    """Distributions, flips by step and group, failures and examples."""
    return {
        "run_id": made.run_id,
        "stage": made.stage,
        "weights": made.weights,
        "before": {name: asdict(found) for name, found in made.before.items()},
        "after": {name: asdict(found) for name, found in made.after.items()},
        "steps": [_counts(step) for step in made.steps],
        "failures": [
            dict(zip(("step", "row", "reward", "status", "detail"), one, strict=True))
            for one in made.failures
        ],
        "examples": [asdict(example) for example in made.examples],
        "notes": made.notes,
    }


def _counts(step: RescoredStep) -> dict[str, object]:
    flips = step.flips
    return {
        "step": step.step,
        "responses": len(step.old),
        "scored_by_both": int((step.old_scored & step.new_scored).sum()),
        "groups": len(flips.groups),
        "pairs": flips.total("pairs"),
        "flipped": flips.total("flipped"),
        "tied": flips.total("tied"),
        "sign_changes": flips.total("signs"),
        "groups_with_sign_change": flips.groups_with_sign_change,
        "became_equal": flips.became_equal,
        "stopped_being_equal": flips.stopped_being_equal,
    }


def report_of(made: Rescoring) -> Report:
    """Distributions, flips, examples, failures, pictures."""
    weights = ", ".join(f"{name} x {weight:g}" for name, weight in made.weights.items())
    title = f"run {made.run_id[:12]}, stage {made.stage}, scored by {weights}"
    parts: list[Table | Picture] = [_distributions(made), _flips(made), _examples(made)]
    if made.failures:
        parts.append(_failures(made))
    return Report(title, made.notes, [*parts, *_pictures(made)])


def _distributions(made: Rescoring) -> Table:
    rows: list[list[Cell]] = [["old", name, *_row(d)] for name, d in made.before.items()]
    rows += [["new", name, *_row(d)] for name, d in made.after.items()]
    columns = ["which", "reward", "scored", "zeros", "unscored", "failed", "mean", "std"]
    columns += ["least", "25 %", "median", "75 %", "most"]
    note = "before weights; total: the weighted sum, as the run summed it; zeros are scored"
    return Table("distributions", columns, rows, note)


def _row(found: ScoreDistribution) -> list[Cell]:
    quantiles: list[Cell] = [None] * 5 if found.quantiles is None else [*found.quantiles]
    counts: list[Cell] = [found.scored, found.zeros, found.unscored, found.failures]
    return [*counts, found.mean, found.std, *quantiles]


def _flips(made: Rescoring) -> Table:
    names = ["step", "scored_by_both", "groups", "pairs", "flipped", "tied", "sign_changes"]
    names += ["groups_with_sign_change", "became_equal", "stopped_being_equal"]
    rows: list[list[Cell]] = []
    for step in made.steps:
        counts = _counts(step)
        rows.append([_cell(counts[name]) for name in names])
    columns = ["step", "responses", "groups", "pairs", "flipped", "tied or untied", "sign changes"]
    columns += ["groups with one", "become all-equal", "stop being all-equal"]
    note = (
        "pairs of a group that change their order; a sign change is a response whose reward moves "
        "across its group's mean, and with it the sign of its advantage; an all-equal group "
        "teaches nothing"
    )
    return Table("what would change within groups", columns, rows, note)


def _cell(value: object) -> Cell:
    assert isinstance(value, int)
    return value


def _examples(made: Rescoring) -> Table:
    rows: list[list[Cell]] = [
        [
            example.step,
            example.row,
            shortened(example.prompt, 200),
            shortened(example.response, 400),
            example.old,
            example.new,
            example.old_rank,
            example.new_rank,
            example.flips,
        ]
        for example in made.examples
    ]
    columns = ["step", "response", "prompt", "text", "old", "new", "old rank", "new rank"]
    note = "by the number of pairs of its group whose order changes; rank 1 is the group's best"
    return Table("responses flipped most", [*columns, "flips"], rows, note)


def _failures(made: Rescoring, limit: int = 20) -> Table:
    rows: list[list[Cell]] = [list(one) for one in made.failures[:limit]]
    note = f"the first {len(rows)} of {len(made.failures)}: such responses are unscored, never 0"
    return Table("failures", ["step", "response", "reward", "status", "detail"], rows, note)


def _pictures(made: Rescoring) -> list[Table | Picture]:
    from posttrain.core.reports.pictures import histogram, scatter

    series: dict[str, list[float]] = {"old": [], "new": []}
    points: dict[str, tuple[list[float], list[float]]] = {"responses": ([], [])}
    for step in made.steps:
        series["old"] += step.old[step.old_scored].tolist()
        series["new"] += step.new[step.new_scored].tolist()
        both = step.old_scored & step.new_scored
        points["responses"][0].extend(step.old[both].tolist())
        points["responses"][1].extend(step.new[both].tolist())
    return [
        Picture("summed rewards", histogram(series, "summed reward", "reward")),
        Picture(
            "old and new",
            scatter(points, "summed reward of each response", "old", "new"),
        ),
    ]
