"""`rescore`: old responses under new rewards, as a report.

The rewards are built and run as a stage runs its own. Nothing is written into the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from posttrain.core.analysis.evidence import StepEvidence
from posttrain.core.analysis.forensics import component_scores
from posttrain.core.analysis.report import Picture, Report, Row, Table, shortened, table
from posttrain.core.analysis.rescoring import (
    Flips,
    ScoreDistribution,
    distribution,
    find_flips,
    recorded,
)
from posttrain.core.config.resolve import ResolvedRun
from posttrain.core.config.rl_stage import TOTAL, RlStage
from posttrain.core.config.spec import Spec, parse_spec
from posttrain.core.errors import ConfigError, RunError
from posttrain.core.models.device import set_threads
from posttrain.core.rewards.checking import is_failure
from posttrain.core.rewards.scoring import Scorer, asked_of, gated, score_samples, shaped_sum
from posttrain.core.runtime.plugin_files import PLUGIN_FILE
from posttrain.core.types import Score
from posttrain.pipelines.analysis.forensics import distribution_row
from posttrain.pipelines.analysis.past_run import PastRun, read_steps
from posttrain.pipelines.rl.scorer import build_scorer

SHOWN_EXAMPLES, SHOWN_FAILURES = 12, 20


def parse_reward(text: str) -> tuple[Spec, float]:
    """`length_penalty,max_length=64:0.5` as a spec and a weight, 1 where none is given."""
    in_file = PLUGIN_FILE.match(text.partition(",")[0].strip())
    if in_file is not None and text.strip().count(":") == in_file[0].count(":"):
        return parse_spec("--reward", text), 1.0  # its colon stands before a class
    head, sign, tail = text.rpartition(":")
    if not sign or any(bracket in tail for bracket in "]})"):
        return parse_spec("--reward", text), 1.0
    try:
        weight = float(tail)
    except ValueError:
        if "=" in head.rpartition(",")[2]:  # a colon of the last field's own value
            return parse_spec("--reward", text), 1.0
        raise ConfigError(
            f"--reward '{text}': the weight '{tail}' after the colon is not a number; the form is "
            "--reward NAME,field=value:0.5"
        ) from None
    if not math.isfinite(weight):
        raise ConfigError(f"--reward '{text}': the weight {tail} is not finite; give a number")
    return parse_spec("--reward", head), weight


@dataclass(frozen=True, slots=True)
class _Example:
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
class _Step:
    """One step: rewards [B] before and after, NaN where a row is not scored."""

    step: int
    old: Tensor
    new: Tensor
    flips: Flips

    @property
    def both(self) -> Tensor:
        """Rows [B] that are scored by both."""
        return ~(self.old.isnan() | self.new.isnan())


@dataclass(slots=True)
class _Rescoring:
    """All steps, and their scores by reward before and after."""

    steps: list[_Step] = field(default_factory=list)
    before: dict[str, list[Score]] = field(default_factory=dict)
    after: dict[str, list[Score]] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)  # Any: cells of a table
    examples: list[_Example] = field(default_factory=list)

    def distributions(self, *, new: bool) -> dict[str, ScoreDistribution]:
        """By reward; `total` is that of the summed rewards."""
        totals = [recorded((step.new if new else step.old).tolist()) for step in self.steps]
        found = self.after if new else self.before
        found = {**found, TOTAL: [score for scores in totals for score in scores]}
        return {name: distribution(scores) for name, scores in found.items()}


def rescore(
    run: PastRun, stage: str | None, step: int | None, rewards: Sequence[tuple[Spec, float]]
) -> Report:
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
    there = run.stage_inputs(found.stage, resolved, run.inputs(found.stage))
    scorer = build_scorer(there, config, there.tokenizer())
    _check_answers(scorer)
    names = scorer.names
    made = _Rescoring()
    with scorer.pool or nullcontext():
        for evidence in read_steps(found, step):
            columns = _score(evidence, scorer)
            _note_scores(made, evidence, dict(zip(names, columns, strict=True)))
            made.steps.append(_rescored(evidence, scorer, columns))
            made.examples += _examples(evidence, made.steps[-1])
    weights = dict(zip(names, (w.weight for w in scorer.rewards), strict=True))
    return _report(run, found.stage, weights, _notes(run.rl_stage(found.stage)), made)


def _check_answers(scorer: Scorer) -> None:
    """Refuse rewards that compare with answers where the problems have none."""
    needs = [w.name for w in scorer.rewards if w.reward.needs_answer or w.reward.is_verdict]
    place = scorer.task.unjudged() if needs else ""
    if place:
        raise ConfigError(
            f"--reward {needs[0]} compares with the answers of problems, and {place} has none: "
            "name rewards that read the response alone"
        )


def _with_rewards(run: PastRun, stage: str, rewards: Sequence[tuple[Spec, float]]) -> ResolvedRun:
    """The run's config with these rewards, every field filled in as for a stage of a run."""
    values: dict[str, Any] = run.raw_stage(stage)  # Any: YAML values
    values["rewards"] = [run.component(spec) | {"weight": weight} for spec, weight in rewards]
    try:
        return run.with_stage(stage, values)
    except ConfigError as error:
        options = ", ".join(f"--reward '{spec.text}'" for spec, _ in rewards)
        raise ConfigError(f"{options} cannot score stage '{stage}' of this run: {error}") from error


def _score(evidence: StepEvidence, scorer: Scorer) -> list[list[Score]]:
    """A column of scores per reward, of what the run's own rewards saw of each response."""
    samples = evidence.batch.samples
    if len(samples) != len(evidence.batch):
        raise RunError(
            f"the evidence of step {evidence.step} has {len(samples)} of "
            f"{len(evidence.batch)} responses with what rewards saw of them; compute the stage "
            "again with --no-cache"
        )
    return score_samples(scorer.rewards, samples, scorer.pool)


def _note_scores(made: _Rescoring, evidence: StepEvidence, columns: dict[str, list[Score]]) -> None:
    """Add a step's scores, old and new, and the new ones that failed."""
    for name, column in component_scores(evidence).items():
        made.before.setdefault(name, []).extend(column)
    for name, column in columns.items():
        made.after.setdefault(name, []).extend(column)
        made.failures += [
            {"step": evidence.step, "row": row, "reward": name}
            | {"status": score.status, "detail": score.detail}
            for row, score in enumerate(column)
            if is_failure(score)
        ]


def _rescored(evidence: StepEvidence, scorer: Scorer, columns: Sequence[Sequence[Score]]) -> _Step:
    batch = evidence.batch
    values = [[math.nan if s.value is None else s.value for s in column] for column in columns]
    components = gated(torch.tensor(values, dtype=torch.float64).T, scorer.rewards)
    failed = torch.tensor([any(map(is_failure, row)) for row in zip(*columns, strict=True)])
    total, scored = shaped_sum(
        components,
        scorer.rewards,
        scorer.clip,
        on_missing=scorer.on_missing,
        failed=failed,
        asked=asked_of(scorer.rewards, batch.problems),
    )
    old, was_scored = batch.column("rewards"), batch.column("scored").bool()
    flips = find_flips(old, total, was_scored & scored, batch.group_id)
    return _Step(
        evidence.step,
        old.masked_fill(~was_scored, math.nan),
        total.masked_fill(~scored, math.nan),
        flips,
    )


def _examples(evidence: StepEvidence, step: _Step) -> list[_Example]:
    """The responses of a step in most flipped pairs."""
    batch, found = evidence.batch, []
    texts = batch.transcripts or batch.texts
    for group in step.flips.groups:
        old, new = step.old[list(group.rows)], step.new[list(group.rows)]
        for place, row in enumerate(group.rows):
            flips = int(step.flips.row_flips[row])
            if not flips:
                continue
            found.append(
                _Example(
                    step=step.step,
                    row=row,
                    group=group.group,
                    prompt=batch.problems[row].prompt if batch.problems else "",
                    response=texts[row] if texts else "",
                    old=float(old[place]),
                    new=float(new[place]),
                    old_rank=1 + int((old > old[place]).sum()),
                    new_rank=1 + int((new > new[place]).sum()),
                    flips=flips,
                )
            )
    return sorted(found, key=lambda e: (-e.flips, e.row))[:SHOWN_EXAMPLES]


def _notes(stage: RlStage) -> list[str]:
    notes = []
    if stage.overlong_filter == "exclude":
        notes.append(
            "overlong_filter: exclude left truncated responses out of the run's groups; they are "
            "left out of the comparison too"
        )
    if stage.drop_groups != "none" or stage.sampler.name != "group":
        notes.append(
            "the run dropped groups by their own rewards: what it dropped is not in the evidence, "
            "and other rewards might have kept it"
        )
    if stage.resample is not None:
        notes.append("the run resampled rows by reward: some responses occur more than once")
    return notes


def _report(
    run: PastRun, stage: str, weights: dict[str, float], notes: list[str], made: _Rescoring
) -> Report:
    before, after = made.distributions(new=False), made.distributions(new=True)
    examples = sorted(made.examples, key=lambda e: (-e.flips, e.step, e.row))[:SHOWN_EXAMPLES]
    steps: list[dict[str, Any]] = [  # Any: cells of a table
        {"step": step.step, "responses": len(step.old), "scored_by_both": int(step.both.sum())}
        | step.flips.counts()
        for step in made.steps
    ]
    named = ", ".join(f"{name} x {weight:g}" for name, weight in weights.items())
    return Report(
        f"run {run.short_id}, stage {stage}, scored by {named}",
        notes,
        [
            _distributions(before, after),
            _changes(steps),
            _flipped(examples),
            *([_failures(made)] if made.failures else []),
            *_pictures(made),
        ],
        {
            "run_id": run.record.run_id,
            "stage": stage,
            "weights": weights,
            "before": {name: asdict(one) for name, one in before.items()},
            "after": {name: asdict(one) for name, one in after.items()},
            "steps": steps,
            "failures": made.failures,
            "examples": [asdict(example) for example in examples],
            "notes": notes,
        },
    )


def _distributions(
    before: Mapping[str, ScoreDistribution], after: Mapping[str, ScoreDistribution]
) -> Table:
    rows: list[Row] = [
        {"which": which, "reward": name} | distribution_row(one)
        for which, found in (("old", before), ("new", after))
        for name, one in found.items()
    ]
    note = "before weights; total: the weighted sum, as the run summed it; zeros are scored"
    return table("distributions", rows, note)


def _changes(steps: Sequence[dict[str, Any]]) -> Table:  # Any: cells of a table
    return table(
        "what would change within groups",
        [{name.replace("_", " "): value for name, value in step.items()} for step in steps],
        "pairs of a group that change their order; tied: pairs that become equal or stop being "
        "equal; a sign change is a response whose reward moves across its group's mean, and with "
        "it the sign of its advantage; an all-equal group teaches nothing",
    )


def _flipped(examples: Sequence[_Example]) -> Table:
    return table(
        "responses flipped most",
        [
            asdict(example)
            | {"prompt": shortened(example.prompt, 200)}
            | {"response": shortened(example.response, 400)}
            for example in examples
        ],
        "by the number of pairs of its group whose order changes; rank 1 is the group's best",
    )


def _failures(made: _Rescoring) -> Table:
    count = len(made.failures)
    note = f"the first {SHOWN_FAILURES} of {count}: such responses are unscored, never 0"
    return table("failures", made.failures[:SHOWN_FAILURES], note)


def _pictures(made: _Rescoring) -> list[Picture]:
    from posttrain.core.analysis.pictures import histogram, scatter

    old, new, both = (
        torch.cat([getattr(step, name) for step in made.steps]) for name in ("old", "new", "both")
    )
    series = {name: side[~side.isnan()].tolist() for name, side in (("old", old), ("new", new))}
    points = {"responses": (old[both].tolist(), new[both].tolist())}
    return [
        Picture("summed rewards", histogram(series, "summed reward", "reward")),
        Picture("old and new", scatter(points, "summed reward of each response", "old", "new")),
    ]
