"""A sweep's results as one report: effects against the base, costs, learning speed, curves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from posttrain.core.analysis.report import Cell, Link, Report, Row, Table, table
from posttrain.core.analysis.statistics import Outcome, point, read_outcomes
from posttrain.core.analysis.sweep import (
    Effect,
    Speed,
    learning_speed,
    paired_effect,
    seeds_effect,
)
from posttrain.core.config.rl_stage import TRAINING_KINDS
from posttrain.core.errors import PosttrainError
from posttrain.core.store.artifacts import StageResult
from posttrain.pipelines.analysis.past_run import PastRun, open_record
from posttrain.pipelines.analysis.run_results import RunResults, read_results
from posttrain.pipelines.analysis.runs import MAIN_METRICS, Group, pictures
from posttrain.pipelines.run.progress import duration
from posttrain.pipelines.sweep.branches import Branch, Sweep
from posttrain.pipelines.sweep.record import BranchRecord

ALIASES = {"accuracy": "eval/greedy_accuracy", "sampled": "eval/sampled_accuracy"}


@dataclass(frozen=True, slots=True)
class Measured:
    """A branch's results. `value` is the measure, None where it is not there."""

    branch: Branch
    record: BranchRecord
    value: float | None = None
    outcomes: tuple[Outcome, ...] = ()
    curves: RunResults | None = None
    tokens: float | None = None
    note: str = ""

    @property
    def seconds(self) -> float:
        """What was really computed for it: stages that another branch made cost it nothing."""
        return sum(self.record.computed.values())


def measured(
    sweep: Sweep, branch: Branch, record: BranchRecord, home: Path, store: Path
) -> Measured:
    """What a branch left; what cannot be read of it is a note, and no error."""
    if not record.run_id or record.status == "waiting":
        return Measured(branch, record)
    stage, metric = sweep.measure
    try:
        run = open_record(record.run_id, home, store)
    except PosttrainError as error:
        return Measured(branch, record, note=str(error))
    value: float | None = None
    outcomes: tuple[Outcome, ...] = ()
    note = ""
    if record.status == "finished":
        result, why = run.store.lookup(stage, run.record.stages.get(stage, ""))
        if result is None:
            note = f"the result of stage '{stage}' is unusable ({why})"
        else:
            value, outcomes = _value(result, metric)
            if value is None:
                note = f"stage '{stage}' has no metric '{metric}' (it has {sorted(result.metrics)})"
    curves = _curves(run, stage)
    tokens = _new_tokens(curves, record)
    return Measured(branch, record, value, outcomes, curves, tokens, note)


def _value(result: StageResult, metric: str) -> tuple[float | None, tuple[Outcome, ...]]:
    value = result.metrics.get(ALIASES.get(metric, metric))
    if metric not in ALIASES or result.kind != "evaluate":
        return value, ()
    return value, tuple(read_outcomes(result.artifact("evaluation").path))


def _curves(run: PastRun, measured_by: str) -> RunResults | None:
    """The steps of the stage that trained the model that is measured, if they are kept."""
    stages = run.resolved.config.stages
    source = stages[measured_by].inputs.get("model", "")
    trained = source if source in stages and stages[source].kind in TRAINING_KINDS else None
    try:
        return read_results(run, trained)
    except PosttrainError:  # no step is on record, as of a run that failed before the first
        return None


def _new_tokens(curves: RunResults | None, record: BranchRecord) -> float | None:
    """Tokens that were sampled for this branch, 0 where another had sampled them."""
    if curves is None or curves.tokens is None:
        return None
    return curves.tokens if curves.stage not in record.reused else 0.0


# --- effects -------------------------------------------------------------------------------------


def effect_of(own: Sequence[Measured], base: Sequence[Measured], metric: str) -> Effect | None:
    """A variant's runs against the base's of the same seeds."""
    bases = {one.branch.seed: one for one in base}
    pairs = [(bases[one.branch.seed], one) for one in own if one.branch.seed in bases]
    if all(a.outcomes and b.outcomes for a, b in pairs):
        found = paired_effect({b.branch.seed: _differences(a, b, metric) for a, b in pairs})
        if found is not None:
            return found
    pairs_of_values = [(a.value, b.value) for a, b in pairs]
    return seeds_effect([b - a for a, b in pairs_of_values if a is not None and b is not None])


def _differences(base: Measured, own: Measured, metric: str) -> dict[str, float]:
    """By problem, those that both answered."""
    known = {row.key: _score(row, metric) for row in base.outcomes}
    return {
        row.key: score - before
        for row in own.outcomes
        if (score := _score(row, metric)) is not None and (before := known.get(row.key)) is not None
    }


def _score(row: Outcome, metric: str) -> float | None:
    return float(row.right) if metric == "accuracy" else row.sampled


def early_effect(own: Sequence[Measured], base: Sequence[Measured]) -> Effect | None:
    """Of a variant that was stopped: at the last evaluation that it shares with the base."""
    bases = {one.branch.seed: one.record for one in base}
    cells = {}
    for one in own:
        other = bases.get(one.branch.seed)
        if other is None or one.record.problems != other.problems:
            continue
        both = sorted(one.record.right.keys() & other.right.keys())
        if both:
            pairs = zip(one.record.right[both[-1]], other.right[both[-1]], strict=True)
            cells[one.branch.seed] = {
                f"{other.problems} {place}": float(int(mine) - int(theirs))
                for place, (mine, theirs) in enumerate(pairs)
            }
    return paired_effect(cells)


# --- the report ----------------------------------------------------------------------------------


def report_of(
    sweep: Sweep,
    settings: Mapping[str, Mapping[str, object]],
    results: Sequence[Measured],
    *,
    wall_s: float,
    links: Mapping[str, str],
) -> Report:
    """The one table of a sweep, and what it is made of. `links` are MLflow's pages by run id."""
    by_variant = {name: [r for r in results if r.branch.variant == name] for name in settings}
    rows = [
        _variant_row(sweep, name, by_variant[name], by_variant[sweep.base]) for name in settings
    ]
    groups = [
        Group(name, tuple(r.curves for r in found if r.curves is not None))
        for name, found in by_variant.items()
    ]
    groups = [group for group in groups if group.runs]
    curves = [run for group in groups for run in group.runs]
    metrics = [m for m in MAIN_METRICS if any(run.series(m) for run in curves)]
    stage, metric = sweep.measure
    share = ALIASES.get(metric, metric).startswith("eval/")
    computed = sum(one.seconds for one in results)
    notes = [
        f"measured by {metric} of stage '{stage}'; base: {sweep.base}; seeds "
        f"{', '.join(map(str, sweep.seeds))}",
        f"{duration(computed)} were computed, {duration(wall_s)} passed",
        *_notes(sweep, rows, results),
    ]
    tables: list[Table] = [
        table("variants", [_shown(row, share=share) for row in rows], _about(sweep)),
        table("runs", [_run_row(one) for one in results], "seconds: what was computed"),
        table(
            "what the variants set",
            [
                {"variant": name, "setting": path, "value": json.dumps(value, default=str)}
                for name, values in settings.items()
                for path, value in values.items()
            ],
        ),
        table(
            "pages in MLflow",
            [
                {"run": one.branch.label, "page": Link(links[one.record.run_id])}
                for one in results
                if one.record.run_id in links
            ],
        ),
    ]
    return Report(
        f"sweep {sweep.name}: {len(settings)} variants x {len(sweep.seeds)} seed(s)",
        notes,
        [*tables, *pictures(groups, metrics)],
        {
            "name": sweep.name,
            "base": sweep.base,
            "measure": {"stage": stage, "metric": metric},
            "seeds": list(sweep.seeds),
            "variants": rows,
            "runs": [_run_values(one) for one in results],
            "settings": {name: dict(values) for name, values in settings.items()},
            "seconds": {"computed": computed, "wall": wall_s},
            "notes": notes,
        },
    )


def _about(sweep: Sweep) -> str:
    target = sweep.section.target
    reached = "" if target is None else f"; to target: until held-out accuracy {target:g}"
    return (
        "effect: minus the base, 95 % interval, in points where it is a share; seconds and tokens: "
        f"what was computed and sampled, a shared stage counts where it ran{reached}"
    )


def _variant_row(
    sweep: Sweep, name: str, own: Sequence[Measured], base: Sequence[Measured]
) -> dict[str, object]:
    """A variant's results as JSON; fractions, not points."""
    values = [one.value for one in own if one.value is not None]
    statuses = [one.record.status for one in own]
    stopped = [one for one in own if one.record.status in ("stopped", "pruned")]
    effect = None
    if name != sweep.base:
        metric = sweep.measure[1]
        effect = early_effect(own, base) if stopped else effect_of(own, base, metric)
    spread = point(0, values) if values else None
    target = sweep.section.target
    speeds = [] if target is None else [_speed(one, target) for one in own]
    reached = [speed for speed in speeds if speed is not None]
    tokens = [one.tokens for one in own if one.tokens is not None]
    return {
        "variant": name,
        "status": _status(own, statuses),
        "seeds": len(values),
        "value": spread.mean if spread else None,
        "value_low": spread.low if spread else None,
        "value_high": spread.high if spread else None,
        "effect": None if effect is None else asdict(effect) | {"verdict": effect.verdict()},
        "seconds": sum(one.seconds for one in own),
        "tokens": sum(tokens) if tokens else None,
        "reached": f"{len(reached)} of {len(own)}" if target is not None else None,
        "steps_to_target": _mean([speed.step for speed in reached]),
        "tokens_to_target": _mean([s.tokens for s in reached if s.tokens is not None]),
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _speed(one: Measured, target: float) -> Speed | None:
    return None if one.curves is None else learning_speed(one.curves.rows, target)


def _status(own: Sequence[Measured], statuses: Sequence[str]) -> str:
    """`finished`, or how many were not and why."""
    bad = [one for one in own if one.record.status != "finished"]
    if not bad:
        return "finished"
    first = next((one for one in bad if not one.record.reason.startswith("not begun")), bad[0])
    reason = f": {first.record.reason}" if first.record.reason else ""
    if first.record.status in ("stopped", "pruned"):
        return first.record.reason or first.record.status
    return f"{len(bad)} of {len(own)} {first.record.status}{reason}"


def _shown(row: Mapping[str, object], *, share: bool) -> Row:
    """A variant's row for people; `share` says that the measure is one, and effects are points."""
    effect = row["effect"]
    found: dict[str, Cell] = {"variant": str(row["variant"]), "seeds": _cell(row["seeds"])}
    found["measure"] = _cell(row["value"])
    found["effect"] = found["verdict"] = found["how"] = None
    if isinstance(effect, dict):
        low, high = effect["low"], effect["high"]
        shape = "{:+.1f}" if share else "{:+.4g}"
        scaled = [
            shape.format(v * (100 if share else 1))
            for v in (effect["difference"], low, high)
            if v is not None
        ]
        found["effect"] = scaled[0] + (f" [{', '.join(scaled[1:])}]" if scaled[1:] else "")
        found["verdict"], found["how"] = effect["verdict"], effect["how"]
    found["seconds"] = _cell(row["seconds"])
    found["tokens"] = _cell(row["tokens"])
    found["reached target"] = _cell(row["reached"])
    found["steps to target"] = _cell(row["steps_to_target"])
    found["tokens to target"] = _cell(row["tokens_to_target"])
    found["status"] = str(row["status"])
    return found


def _cell(value: object) -> Cell:
    return value if isinstance(value, str | float | int) else None


def _run_row(one: Measured) -> Row:
    record = one.record
    return {
        "variant": one.branch.variant,
        "seed": one.branch.seed,
        "run": record.run_id[:12] or None,
        "status": record.status,
        "measure": one.value,
        "seconds": one.seconds,
        "computed": ", ".join(record.computed) or None,
        "reused": ", ".join(record.reused) or None,
        "reason": record.reason or one.note or None,
    }


def _run_values(one: Measured) -> dict[str, object]:
    record = one.record
    return {
        "variant": one.branch.variant,
        "seed": one.branch.seed,
        "run_id": record.run_id,
        "status": record.status,
        "reason": record.reason,
        "value": one.value,
        "seconds": one.seconds,
        "computed": dict(record.computed),
        "reused": list(record.reused),
        "tokens": one.tokens,
    }


def _notes(
    sweep: Sweep, rows: Sequence[Mapping[str, object]], results: Sequence[Measured]
) -> list[str]:
    notes = [f"{one.branch.label}: {one.note}" for one in results if one.note]
    compared = [row for row in rows if row["effect"] is not None]
    if len(sweep.seeds) == 1 and compared:
        notes.append(
            "one seed: effects are about these trained models; whether the settings differ takes "
            "two or more seeds"
        )
    if len(compared) > 1:
        notes.append(
            f"{len(compared)} effects, each with a 95 % interval of its own: of 20 variants equal "
            "to the base one is expected to look different"
        )
    stopped = [row for row in rows if "stopped" in str(row["status"])]
    if stopped:
        notes.append(
            "a variant that was stopped was behind at that step; whether it would have caught up "
            "later was not tried"
        )
    return notes
