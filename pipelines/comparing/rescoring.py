"""Old responses scored under new rewards, built as the stage builds its own. Writes nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from posttrain.core.artifacts import Artifact
from posttrain.core.config.resolve import ResolvedRun
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.config.spec import Spec
from posttrain.core.errors import ConfigError, RunError
from posttrain.core.evidence.step import StepEvidence
from posttrain.core.forensics.responses import TOTAL, numbered
from posttrain.core.rescoring.flips import Flips, find_flips
from posttrain.core.rescoring.scores import ScoreDistribution, distribution, recorded
from posttrain.core.rewards.checking import is_failure
from posttrain.core.rewards.scoring import Scorer, score_samples, shaped_sum
from posttrain.core.runtime.device import set_threads
from posttrain.core.types import Score
from posttrain.pipelines.comparing.past_run import PastRun, read_steps
from posttrain.pipelines.rl.build import build_scorer


@dataclass(frozen=True, slots=True)
class FlippedExample:
    """A response with its reward before and after; ranks in its group count from 1, best first."""

    step: int
    row: int
    group: int
    prompt: str
    response: str
    old: float
    new: float
    old_rank: int
    new_rank: int
    flips: int


@dataclass(frozen=True, slots=True)
class RescoredStep:
    """One step: rewards [B] and which rows are scored [B], before and after."""

    step: int
    old: Tensor
    new: Tensor
    old_scored: Tensor
    new_scored: Tensor
    flips: Flips


@dataclass(slots=True)
class Rescoring:
    """All steps; `before` and `after` are distributions by reward, `total` that of their sum.

    `failures` are (step, row, reward, status, detail) of the new scores that went wrong.
    """

    run_id: str
    stage: str
    weights: dict[str, float]
    notes: list[str]
    steps: list[RescoredStep] = field(default_factory=list)
    before: dict[str, ScoreDistribution] = field(default_factory=dict)
    after: dict[str, ScoreDistribution] = field(default_factory=dict)
    failures: list[tuple[int, int, str, str, str]] = field(default_factory=list)
    examples: list[FlippedExample] = field(default_factory=list)


SHOWN = 12


def rescore(
    run: PastRun, stage: str | None, step: int | None, rewards: Sequence[tuple[Spec, float]]
) -> Rescoring:
    """Score the kept responses of `step`, or of all steps kept, under `rewards`.

    Raises `ConfigError` for an unknown reward, step or stage, or a reward that needs an input which
    the stage does not have; `RunError` for evidence without the responses' samples.
    """
    if not rewards:
        raise ConfigError("no reward was named: add --reward NAME, such as --reward accuracy")
    found = run.evidence(stage)
    resolved = _with_rewards(run, found.stage, rewards)
    config = resolved.config.stages[found.stage]
    assert isinstance(config, RlStage)
    set_threads(resolved.config.limits.num_threads)
    scorer = _scorer(run, found.stage, resolved, config)
    names = numbered(scorer.names)
    old_scores: dict[str, list[Score]] = {}
    new_scores: dict[str, list[Score]] = {name: [] for name in names}
    made = Rescoring(
        run.record.run_id,
        found.stage,
        dict(zip(names, (w.weight for w in scorer.rewards), strict=True)),
        _notes(run.rl_stage(found.stage)),
    )
    with scorer.pool or nullcontext():
        for evidence in read_steps(found, step):
            columns = _score(evidence, scorer)
            _note_scores(evidence, old_scores, new_scores, dict(zip(names, columns, strict=True)))
            made.failures += [
                (evidence.step, row, name, score.status, score.detail)
                for name, column in zip(names, columns, strict=True)
                for row, score in enumerate(column)
                if is_failure(score)
            ]
            made.steps.append(_rescored(evidence, scorer, columns))
            made.examples += _examples(evidence, made.steps[-1])
    made.before = {name: distribution(scores) for name, scores in old_scores.items()}
    made.after = {name: distribution(scores) for name, scores in new_scores.items()}
    made.before[TOTAL] = distribution(_totals(made.steps, new=False))
    made.after[TOTAL] = distribution(_totals(made.steps, new=True))
    made.examples = sorted(made.examples, key=lambda e: (-e.flips, e.step, e.row))[:SHOWN]
    return made


def _with_rewards(run: PastRun, stage: str, rewards: Sequence[tuple[Spec, float]]) -> ResolvedRun:
    """The run's config with these rewards, every field filled in as for a stage of a run."""
    values: dict[str, Any] = run.raw_stage(stage)  # Any: YAML values
    values["rewards"] = [spec.component() | {"weight": weight} for spec, weight in rewards]
    told = ", ".join(f"--reward '{spec.text}'" for spec, _ in rewards)
    try:
        return run.with_stage(stage, values)
    except ConfigError as error:
        raise ConfigError(f"{told} cannot score stage '{stage}' of this run: {error}") from error


def _scorer(run: PastRun, name: str, resolved: ResolvedRun, stage: RlStage) -> Scorer:
    inputs: Mapping[str, Artifact] = run.inputs(name)
    there = run.stage_inputs(name, resolved, inputs)
    return build_scorer(there, stage, there.tokenizer())


def _score(evidence: StepEvidence, scorer: Scorer) -> list[list[Score]]:
    """A column of scores per reward, of what the run's own rewards saw of each response."""
    samples = evidence.batch.samples
    if len(samples) != len(evidence.batch):
        raise RunError(
            f"the evidence of step {evidence.step} has {len(samples)} of "
            f"{len(evidence.batch)} responses with what rewards saw of them; compute the stage "
            "again with --no-cache"
        )
    return score_samples([weighted.reward for weighted in scorer.rewards], samples, scorer.pool)


def _note_scores(
    evidence: StepEvidence,
    old: dict[str, list[Score]],
    new: dict[str, list[Score]],
    columns: Mapping[str, list[Score]],
) -> None:
    batch = evidence.batch
    for place, name in enumerate(numbered(evidence.component_names)):
        if batch.scores:
            column = [row[place] for row in batch.scores]
        else:
            column = recorded(batch.column("reward_components")[:, place].tolist())
        old.setdefault(name, []).extend(column)
    for name, column in columns.items():
        new[name] += column


def _rescored(
    evidence: StepEvidence, scorer: Scorer, columns: Sequence[Sequence[Score]]
) -> RescoredStep:
    batch = evidence.batch
    values = [[math.nan if s.value is None else s.value for s in column] for column in columns]
    components = torch.tensor(values, dtype=torch.float64).T
    failed = torch.tensor([any(map(is_failure, row)) for row in zip(*columns, strict=True)])
    total, scored = shaped_sum(
        components, scorer.rewards, scorer.clip, on_missing=scorer.on_missing, failed=failed
    )
    old, was_scored = batch.column("rewards"), batch.column("scored").bool()
    flips = find_flips(old, total, was_scored & scored, batch.group_id)
    return RescoredStep(evidence.step, old, total, was_scored, scored, flips)


def _examples(evidence: StepEvidence, step: RescoredStep) -> list[FlippedExample]:
    """The responses of a step in most flipped pairs."""
    batch, found = evidence.batch, []
    texts = batch.transcripts or batch.texts
    for group in step.flips.groups:
        rows = torch.tensor(group.rows)
        for row in group.rows:
            flips = int(step.flips.row_flips[row])
            if not flips:
                continue
            old, new = step.old, step.new
            found.append(
                FlippedExample(
                    step.step,
                    row,
                    group.group,
                    batch.problems[row].prompt if batch.problems else "",
                    texts[row] if texts else "",
                    float(old[row]),
                    float(new[row]),
                    1 + int((old[rows] > old[row]).sum()),
                    1 + int((new[rows] > new[row]).sum()),
                    flips,
                )
            )
    return sorted(found, key=lambda e: (-e.flips, e.row))[:SHOWN]


def _totals(steps: Sequence[RescoredStep], *, new: bool) -> list[Score]:
    """The summed rewards as scores; a row that is not scored has none."""
    found = []
    for step in steps:
        values, scored = (step.new, step.new_scored) if new else (step.old, step.old_scored)
        found += [
            Score(value) if known else Score(None, "unscored")
            for value, known in zip(values.tolist(), scored.tolist(), strict=True)
        ]
    return found


def _notes(stage: RlStage) -> list[str]:
    notes = []
    if stage.overlong_filter == "exclude":
        notes.append(
            "overlong_filter: exclude took responses that the limit cut out of the run's groups; "
            "they are out of the comparison too"
        )
    if stage.drop_groups != "none" or stage.sampler.name != "group":
        notes.append(
            "the run dropped groups by their own rewards: what it dropped is not in the evidence, "
            "and other rewards might have kept it"
        )
    if stage.resample is not None:
        notes.append("the run drew rows again by reward: some responses are there more than once")
    return notes
