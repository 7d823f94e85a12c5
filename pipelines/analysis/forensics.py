"""`forensics`: a run's rewards over the steps whose evidence was kept, as a report."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from posttrain.core.analysis.forensics import Pattern, Response, find_patterns, responses_of
from posttrain.core.analysis.report import Cell, Picture, Report, listed, shortened, table
from posttrain.core.analysis.rescoring import QUANTILES, ScoreDistribution, distribution
from posttrain.core.config.rl_stage import TOTAL
from posttrain.pipelines.analysis.past_run import PastRun, read_steps

CUTS = ("least", "25 %", "median", "75 %", "most")
"""Names of `QUANTILES`."""


@dataclass(frozen=True, slots=True)
class _Step:
    """One step: the distribution of each reward by name, lengths and accuracy."""

    step: int
    responses: int
    rewards: dict[str, ScoreDistribution]
    mean_length: float
    accuracy: float | None


def forensics_of(run: PastRun, stage: str | None, step: int | None) -> Report:
    """Of one step, or of all that were kept; errors as of `find_evidence` and `read_steps`."""
    found = run.evidence(stage)
    responses = [responses_of(evidence) for evidence in read_steps(found, step)]
    steps = [_summary(one) for one in responses]
    patterns = find_patterns([response for one in responses for response in one])
    config, notes = run.rl_stage(found.stage), []
    if step is None and len(found.steps) < found.steps[-1]:
        notes.append(
            f"of {found.steps[-1]} steps the evidence of {len(found.steps)} was kept "
            f"({listed(found.steps)}); keep.evidence_mb bounds it"
        )
    if config.drop_groups != "none" or config.sampler.name != "group":
        notes.append("groups that the run dropped before its updates are not in the evidence")
    suspicious = [pattern for pattern in patterns if pattern.suspicious]
    numbers = [one.step for one in steps]
    span = f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
    names = [*(name for name in steps[0].rewards if name != TOTAL), TOTAL]
    return Report(
        f"rewards of run {run.short_id}, stage {found.stage}, steps {span}",
        [f"{len(suspicious)} of {len(patterns)} statistics are beyond their threshold", *notes],
        [
            table(
                "patterns",
                [_pattern(pattern) for pattern in patterns],
                "a pattern says where to look, not that something is wrong; - where there are too "
                "few responses",
            ),
            *(
                table(
                    f"{p.name} of {p.subject}: look at", [_example(r, 200, 400) for r in p.examples]
                )
                for p in suspicious
                if p.examples
            ),
            table(
                "rewards over time",
                [
                    {"reward": name, "step": one.step, **distribution_row(one.rewards[name])}
                    for name in names
                    for one in steps
                ],
                "before weights; zeros are scored; unscored and failed responses are never a zero",
            ),
            _picture(steps, names),
        ],
        {
            "run_id": run.record.run_id,
            "stage": found.stage,
            "quantiles": list(QUANTILES),
            "steps": [asdict(one) for one in steps],
            "patterns": [
                _pattern(pattern) | {"examples": [_example(r) for r in pattern.examples]}
                for pattern in patterns
            ],
            "notes": notes,
        },
    )


def _summary(responses: list[Response]) -> _Step:
    known = [response.correct for response in responses if response.correct is not None]
    return _Step(
        responses[0].step,
        len(responses),
        {name: distribution([r.scores[name] for r in responses]) for name in responses[0].scores},
        sum(response.length for response in responses) / len(responses),
        sum(known) / len(known) if known else None,
    )


def distribution_row(found: ScoreDistribution) -> dict[str, Cell]:
    """A distribution as columns of a table."""
    values = asdict(found)
    cuts = values.pop("quantiles") or [None] * len(CUTS)
    return values | dict(zip(CUTS, cuts, strict=True))


def _pattern(pattern: Pattern) -> dict[str, Cell]:
    names = ("name", "subject", "suspicious", "value", "threshold", "count", "meaning")
    return {name: getattr(pattern, name) for name in names}


def _example(
    response: Response, prompt: int | None = None, text: int | None = None
) -> dict[str, Cell]:
    """A response, with so many characters of its texts."""
    names = ("step", "row", "reward", "correct", "length")
    return {name: getattr(response, name) for name in names} | {
        "prompt": shortened(response.prompt, prompt or len(response.prompt)),
        "text": shortened(response.text, text or len(response.text)),
    }


def _picture(steps: list[_Step], names: list[str]) -> Picture:
    from posttrain.core.analysis.pictures import Panel, Series, curves

    panels = []
    for name in names:
        known = [
            (one.step, cuts) for one in steps if (cuts := one.rewards[name].quantiles) is not None
        ]
        if known:
            numbers = [number for number, _ in known]
            least, low, middle, high, most = zip(*(cuts for _, cuts in known), strict=True)
            median = Series("median", "", numbers, middle, low, high, band=True)
            ends = (Series("least", "", numbers, least), Series("most", "", numbers, most))
            panels.append(Panel(name, "reward", (median, *ends)))
    numbers = [one.step for one in steps]
    length = Series("mean", "", numbers, [one.mean_length for one in steps])
    panels.append(Panel("length", "tokens", (length,)))
    note = "least, median and most of each step; bands: from 25 % to 75 %"
    return Picture("rewards and lengths over time", curves(panels), note)
