"""Algorithms compared on one frozen step of a run: same rollouts, same rewards, same log-probs."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations

from torch import Tensor

from posttrain.core.compare.frozen import FrozenStep, freeze
from posttrain.core.compare.gradients import (
    GradientDifference,
    gradient_difference,
    gradient_norm,
    logprob_gap,
    parameter_gradient,
)
from posttrain.core.compare.pairs import PairResult, compare_pair
from posttrain.core.compare.variant import Variant, VariantResult, evaluate
from posttrain.core.errors import ConfigError
from posttrain.core.evidence.step import StepEvidence
from posttrain.core.runtime.device import set_threads
from posttrain.pipelines.comparing.past_run import PastRun, check_step, read_unchanged
from posttrain.pipelines.comparing.start_model import StartModel, load_start
from posttrain.pipelines.comparing.variants import OWN, Wanted, build_variants
from posttrain.pipelines.rl.build import update_settings


@dataclass(frozen=True, slots=True)
class ModelGradients:
    """Parameter gradients at one policy; `logprob_gap` (nats) is to what the step's update read."""

    source: str
    exact: bool
    logprob_gap: float | None
    norms: dict[str, float]
    pairs: tuple[GradientDifference, ...]


@dataclass(slots=True)
class AlgorithmComparison:
    """Everything of one comparison; `advantage_gap` is of the run's own to those it trained on."""

    run_id: str
    stage: str
    evidence: StepEvidence
    frozen: FrozenStep
    results: list[VariantResult]
    pairs: list[PairResult]
    advantage_gap: float
    gradients: ModelGradients | None = None
    notes: list[str] = field(default_factory=list)


def compare_algorithms(
    run: PastRun, stage: str | None, step: int, wanted: Wanted, *, with_model: bool
) -> AlgorithmComparison:
    """The variants asked for, beside the run's own loss, on `step`.

    Raises `ConfigError` for a step, plugin or combination that is not there, or a variant whose
    columns are not; `ResourceError` and `RunError` as of the evidence.
    """
    found = run.evidence(stage)
    check_step(found, step)
    if not (wanted.algorithms or wanted.losses or wanted.aggregators or wanted.clips):
        raise ConfigError(
            "--step compares algorithms, and none was named: add --algorithm NAME (several times "
            "for several), --loss, --aggregation or --clip"
        )
    evidence = read_unchanged(found, step)
    built = build_variants(run, found.stage, wanted, evidence.kl_coef)
    there = run.stage_inputs(found.stage, run.resolved, {})
    config = run.rl_stage(found.stage)
    set_threads(run.resolved.config.limits.num_threads)
    frozen = freeze(evidence, update_settings(there, config))
    results = [evaluate(frozen, variant) for variant in built.variants]
    pairs = [compare_pair(a, b, frozen.tokens) for a, b in combinations(results, 2)]
    notes = [*built.notes, *_notes(frozen, config.resample is not None)]
    gap = _gap(results[0].advantages, evidence)
    if gap > 1e-6:
        notes.append(
            f"the advantages of '{OWN}' differ by up to {gap:.3g} from those the run trained on: "
            "its estimator remembers earlier steps, or its plugins have changed since"
        )
    made = AlgorithmComparison(
        run.record.run_id, found.stage, evidence, frozen, results, pairs, gap, notes=notes
    )
    if with_model:
        start = load_start(run, found.stage, step)
        made.gradients = _gradients(start, frozen, built.variants)
        if not start.exact:
            made.notes.append(
                f"parameter gradients are at {start.source}, not at the policy that step {step} "
                "started from, which was not kept: run with --set keep.every=1 to keep those"
            )
    return made


def _gradients(start: StartModel, frozen: FrozenStep, variants: list[Variant]) -> ModelGradients:
    found: dict[str, list[Tensor]] = {
        variant.label: parameter_gradient(start.model, frozen, variant) for variant in variants
    }
    return ModelGradients(
        start.source,
        start.exact,
        logprob_gap(start.model, frozen),
        {label: gradient_norm(gradient) for label, gradient in found.items()},
        tuple(gradient_difference((a, b), found[a], found[b]) for a, b in combinations(found, 2)),
    )


def _gap(advantages: Tensor, evidence: StepEvidence) -> float:
    """Largest |difference| to the recorded advantages on tokens with loss."""
    kept = evidence.batch.mask.bool()
    gaps = (advantages - evidence.batch.column("advantages"))[kept].abs()
    return float(gaps.max()) if gaps.numel() else 0.0


def _notes(frozen: FrozenStep, resampled: bool) -> list[str]:
    notes = []
    unread = int((frozen.tokens.any(dim=1) & ~frozen.read).sum())
    if unread:
        notes.append(
            f"{unread} of {len(frozen.batch)} responses were not read by the run's update (their "
            "advantages were 0, or it stopped early): the old policy's log-probs stand for them"
        )
    moved = (frozen.logprobs - frozen.batch.column("old_logprobs"))[frozen.tokens].abs()
    if moved.numel() and float(moved.max()) == 0.0:
        notes.append(
            "every log-prob is still the old policy's (one update per batch), so all ratios are 1 "
            "and no clip can act: losses that differ only in their clip are equal here"
        )
    if resampled:
        notes.append("the run drew rows again by reward: groups are those after that draw")
    return notes
