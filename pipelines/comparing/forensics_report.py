"""Forensics as a report, and as one JSON object."""

from __future__ import annotations

from dataclasses import asdict

from posttrain.core.forensics.patterns import Pattern
from posttrain.core.forensics.responses import Response
from posttrain.core.reports.report import Cell, Picture, Report, Table, shortened
from posttrain.core.rescoring.scores import QUANTILES
from posttrain.pipelines.comparing.forensics import Forensics


def to_json(made: Forensics) -> dict[str, object]:
    """Distributions by step, and every pattern with its examples."""
    return {
        "run_id": made.run_id,
        "stage": made.stage,
        "quantiles": list(QUANTILES),
        "steps": [asdict(step) for step in made.steps],
        "patterns": [_pattern(pattern) for pattern in made.patterns],
        "notes": list(made.notes),
    }


def _pattern(pattern: Pattern) -> dict[str, object]:
    return {
        "name": pattern.name,
        "subject": pattern.subject,
        "value": pattern.value,
        "threshold": pattern.threshold,
        "count": pattern.count,
        "suspicious": pattern.suspicious,
        "meaning": pattern.meaning,
        "examples": [_example(response) for response in pattern.examples],
    }


def _example(response: Response) -> dict[str, object]:
    return {
        "step": response.step,
        "row": response.row,
        "prompt": response.prompt,
        "text": response.text,
        "reward": response.reward,
        "correct": response.correct,
        "length": response.length,
    }


def report_of(made: Forensics) -> Report:
    """Patterns, what they rest on, examples, then rewards over time."""
    numbers = [step.step for step in made.steps]
    title = f"rewards of run {made.run_id[:12]}, stage {made.stage}, steps {_span(numbers)}"
    suspicious = [pattern for pattern in made.patterns if pattern.suspicious]
    first = f"{len(suspicious)} of {len(made.patterns)} statistics are beyond their threshold"
    parts: list[Table | Picture] = [_patterns(made)]
    parts += [_examples(pattern) for pattern in suspicious if pattern.examples]
    parts += [_over_time(made), *_pictures(made)]
    return Report(title, [first, *made.notes], parts)


def _span(steps: list[int]) -> str:
    return f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else str(steps[0])


def _patterns(made: Forensics) -> Table:
    rows: list[list[Cell]] = [
        [p.name, p.subject, _verdict(p), p.value, p.threshold, p.count, p.meaning]
        for p in made.patterns
    ]
    columns = ["pattern", "of", "suspicious", "value", "threshold", "responses", "what it is"]
    note = "a pattern says where to look, not that something is wrong; - where there are too few"
    return Table("patterns", columns, rows, note)


def _verdict(pattern: Pattern) -> Cell:
    return None if pattern.suspicious is None else pattern.suspicious


def _examples(pattern: Pattern) -> Table:
    rows: list[list[Cell]] = [
        [
            response.step,
            response.row,
            shortened(response.prompt, 200),
            shortened(response.text, 400),
            response.length,
            response.reward,
            response.correct,
        ]
        for response in pattern.examples
    ]
    columns = ["step", "response", "prompt", "text", "tokens", "reward", "correct"]
    return Table(f"{pattern.name} of {pattern.subject}: look at", columns, rows)


def _over_time(made: Forensics) -> Table:
    rows: list[list[Cell]] = []
    for name in made.names:
        for step in made.steps:
            found = step.rewards.get(name)
            if found is None:
                continue
            cuts: list[Cell] = [None] * 5 if found.quantiles is None else [*found.quantiles]
            counts: list[Cell] = [found.scored, found.zeros, found.unscored]
            failures: list[Cell] = [found.errors, found.timeouts, found.crashes]
            rows.append([name, step.step, *counts, *failures, found.mean, *cuts])
    columns = ["reward", "step", "scored", "zeros", "unscored", "errors", "timeouts", "crashes"]
    columns += ["mean", "least", "25 %", "median", "75 %", "most"]
    note = "before weights; zeros are scored; what is unscored or failed is never a zero"
    return Table("rewards over time", columns, rows, note)


def _pictures(made: Forensics) -> list[Table | Picture]:
    from posttrain.core.reports.pictures import Curve, curves

    panels: dict[str, list[Curve]] = {}
    for name in made.names:
        known = [
            (step.step, found.quantiles)
            for step in made.steps
            if (found := step.rewards.get(name)) is not None and found.quantiles is not None
        ]
        if known:
            steps = [step for step, _ in known]
            least, low, middle, high, most = zip(*(cut for _, cut in known), strict=True)
            panels[name] = [
                Curve("median", steps, middle, low, high),
                Curve("least", steps, least),
                Curve("most", steps, most),
            ]
    steps = [step.step for step in made.steps]
    panels["length, tokens"] = [Curve("mean", steps, [step.mean_length for step in made.steps])]
    note = "least, median and most of each step; bands: from 25 % to 75 %"
    return [Picture("rewards and lengths over time", curves(panels), note)]
