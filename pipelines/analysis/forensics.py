"""`forensics`: a run's rewards over the steps whose evidence was kept, as a report."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from posttrain.core.analysis.forensics import (
    TOTAL,
    Pattern,
    Response,
    find_patterns,
    responses_of,
)
from posttrain.core.analysis.report import Cell, Picture, Report, Row, shortened, table
from posttrain.core.analysis.rescoring import QUANTILES, ScoreDistribution, distribution
from posttrain.pipelines.analysis.past_run import PastRun, listed, read_steps

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
                [_pattern_row(pattern) for pattern in patterns],
                "a pattern says where to look, not that something is wrong; - where there are too "
                "few responses",
            ),
            *(
                table(f"{p.name} of {p.subject}: look at", [_shown(r) for r in p.examples])
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
            "patterns": [_pattern_values(pattern) for pattern in patterns],
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
    cuts: dict[str, Cell] = dict(zip(CUTS, found.quantiles or [None] * len(CUTS), strict=True))
    return {
        "scored": found.scored,
        "zeros": found.zeros,
        "unscored": found.unscored,
        "errors": found.errors,
        "timeouts": found.timeouts,
        "crashes": found.crashes,
        "mean": found.mean,
        "std": found.std,
    } | cuts


def _pattern_row(pattern: Pattern) -> Row:
    return {
        "pattern": pattern.name,
        "of": pattern.subject,
        "suspicious": pattern.suspicious,
        "value": pattern.value,
        "threshold": pattern.threshold,
        "responses": pattern.count,
        "what it is": pattern.meaning,
    }


def _example(response: Response) -> dict[str, Cell]:
    return {
        "step": response.step,
        "row": response.row,
        "prompt": response.prompt,
        "text": response.text,
        "reward": response.reward,
        "correct": response.correct,
        "length": response.length,
    }


def _shown(response: Response) -> Row:
    short = {"prompt": shortened(response.prompt, 200), "text": shortened(response.text, 400)}
    return _example(response) | short


def _pattern_values(pattern: Pattern) -> dict[str, object]:
    fields = ("name", "subject", "value", "threshold", "count", "suspicious", "meaning")
    examples = [_example(response) for response in pattern.examples]
    return {name: getattr(pattern, name) for name in fields} | {"examples": examples}


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
