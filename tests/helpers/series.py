"""Metrics of made-up stages, as rows by step: what alarms and dashboards are tried on."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping

from posttrain.core.analysis.alarms import Row, Seen, judge
from posttrain.core.config.alarms import AlarmsSection
from posttrain.core.math.intervals import share_interval, wilson
from posttrain.core.tracking.metric_names import ALARM

Curve = Callable[[float], float]
"""A value by the share of the stage that is done, from 0 to 1."""


def rising(low: float, high: float) -> Curve:
    """A straight line."""
    return lambda done: low + (high - low) * done


def flat(value: float) -> Curve:
    return lambda done: value


def made(
    curves: Mapping[str, Curve],
    steps: int = 60,
    *,
    held_out: Curve | None = None,
    average: Curve | None = None,
    passed: Curve | None = None,
    every: int = 10,
    problems: int = 200,
    noise: float = 0.0,
    seed: int = 0,
) -> list[dict[str, float]]:
    """Rows of a stage whose metrics follow `curves`, each value times 1 plus or minus `noise`.

    `held_out`, and `average` with `passed` of eight answers, are measured before the first step,
    `every` steps and after the last.
    """
    draw, rows = random.Random(seed), list[dict[str, float]]()
    for step in range(steps + 1):
        row, done = {"step": float(step)}, step / steps
        if step:
            factor = {name: 1 + noise * draw.uniform(-1, 1) for name in curves}
            row |= {name: curve(done) * factor[name] for name, curve in curves.items()}
        if step % every == 0 or step == steps:
            row |= _evaluated(done, held_out, average, passed, problems)
        rows.append(row)
    return rows


def _evaluated(
    done: float, held_out: Curve | None, average: Curve | None, passed: Curve | None, problems: int
) -> dict[str, float]:
    row: dict[str, float] = {}
    if held_out is not None:
        right = round(held_out(done) * problems)
        low, high = wilson(right, problems)
        row["eval/greedy_accuracy"] = right / problems
        row |= {"eval/greedy_low": low, "eval/greedy_high": high}
    if average is not None and passed is not None:
        row["eval/sampled_problems"] = 16.0
        for name, value in (("avg_at", average(done)), ("pass_at", passed(done))):
            _, low, high = share_interval([value] * 16)
            row |= {f"eval/{name}/8": value, f"eval/{name}_low/8": low, f"eval/{name}_high/8": high}
        row |= {"eval/pass_at/1": average(done), "eval/pass_at/2": average(done)}
    return row


def with_alarms(rows: Iterable[Row], limits: AlarmsSection | None = None) -> list[dict[str, float]]:
    """The rows with `alarm/NAME`, judged step by step as a stage does."""
    found: list[dict[str, float]] = []
    for row in rows:
        now = {name: value for name, value in row.items() if not name.startswith(ALARM)}
        if row["step"]:
            so_far = [*found, now]
            held = [r for r in so_far if "eval/greedy_accuracy" in r]
            told = [r for r in so_far if "eval/sampled_problems" in r]
            texts = judge(Seen(now, found, held, told), limits or AlarmsSection())
            now |= {ALARM + name: 1.0 for name, text in texts.items() if text}
        found.append(now)
    return found
