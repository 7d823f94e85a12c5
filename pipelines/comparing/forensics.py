"""Forensics of a run's rewards, over the steps whose evidence was kept."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.core.forensics.patterns import Pattern, find_patterns
from posttrain.core.forensics.responses import TOTAL, Response, responses_of
from posttrain.core.rescoring.scores import ScoreDistribution, distribution
from posttrain.pipelines.comparing.past_run import PastRun, listed, read_steps


@dataclass(frozen=True, slots=True)
class StepSummary:
    """One step: the distribution of each reward by name, lengths and accuracy."""

    step: int
    responses: int
    rewards: dict[str, ScoreDistribution]
    mean_length: float
    accuracy: float | None


@dataclass(frozen=True, slots=True)
class Forensics:
    """A stage's rewards over time, and the patterns over all of its kept steps."""

    run_id: str
    stage: str
    steps: tuple[StepSummary, ...]
    patterns: tuple[Pattern, ...]
    notes: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """The rewards in order, the total last."""
        found = dict.fromkeys(name for step in self.steps for name in step.rewards)
        return [*(name for name in found if name != TOTAL), TOTAL]


def forensics_of(run: PastRun, stage: str | None, step: int | None) -> Forensics:
    """Of one step, or of all that were kept; errors as of `find_evidence` and `read_steps`."""
    found = run.evidence(stage)
    everything: list[Response] = []
    steps = []
    for evidence in read_steps(found, step):
        responses = responses_of(evidence)
        steps.append(_summary(evidence.step, responses))
        everything += responses
    config = run.rl_stage(found.stage)
    notes = []
    if step is None and len(found.steps) < found.steps[-1]:
        notes.append(
            f"of {found.steps[-1]} steps the evidence of {len(found.steps)} was kept "
            f"({listed(found.steps)}); keep.evidence_mb bounds it"
        )
    if config.drop_groups != "none" or config.sampler.name != "group":
        notes.append("groups that the run dropped before its updates are not in the evidence")
    return Forensics(
        run.record.run_id,
        found.stage,
        tuple(steps),
        tuple(find_patterns(everything)),
        tuple(notes),
    )


def _summary(step: int, responses: list[Response]) -> StepSummary:
    names = list(dict.fromkeys(name for response in responses for name in response.scores))
    known = [response.correct for response in responses if response.correct is not None]
    return StepSummary(
        step,
        len(responses),
        {name: distribution([response.scores[name] for response in responses]) for name in names},
        sum(response.length for response in responses) / max(1, len(responses)),
        sum(known) / len(known) if known else None,
    )
