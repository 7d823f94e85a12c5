"""`compare --frozen`: variants ranked by bias and variance of their gradients on recorded steps.

All variants have the same rollouts, rewards and log-probs, and one policy's derivatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from transformers import PreTrainedModel

from posttrain.core.analysis.frozen import FrozenStep, freeze
from posttrain.core.analysis.gradient_quality import (
    QualityReport,
    gradient_sketch,
    measure,
    pooled,
)
from posttrain.core.analysis.report import Picture, Report, Table, table
from posttrain.core.config.spec import parse_spec
from posttrain.core.models.device import set_threads
from posttrain.core.runtime.seeding import derive_seed
from posttrain.core.training.forward import forward_only
from posttrain.pipelines.analysis.algorithms import start_model
from posttrain.pipelines.analysis.past_run import PastRun, check_step, read_unchanged
from posttrain.pipelines.analysis.variants import OWN, Wanted, build_variants
from posttrain.pipelines.rl.build import update_settings


@dataclass(frozen=True, slots=True)
class Ranking:
    """How to rank: at the policy that began `step` (None: the first that was kept), on the groups
    of `pool` recorded steps from there, by `batches` draws, in `directions` random directions."""

    step: int | None
    pool: int
    batches: int
    directions: int


def rank_frozen(run: PastRun, stage: str | None, wanted: Wanted, how: Ranking) -> Report:
    """The variants asked for, or all aggregators, next to the run's own loss.

    Raises `ConfigError` for a step, plugin or combination that does not exist, too few groups or a
    variant whose columns are missing; `ResourceError` and `RunError` as for the evidence.
    """
    found = run.evidence(stage)
    first = found.steps[0] if how.step is None else how.step
    check_step(found, first)
    wanted = wanted if wanted.any else _every_aggregator(run, found.stage, wanted)
    there, config = run.stage_inputs(found.stage, run.resolved, {}), run.rl_stage(found.stage)
    settings = update_settings(there, config)
    set_threads(run.resolved.config.limits.num_threads)
    steps = [number for number in found.steps if number >= first][: how.pool]
    read = [read_unchanged(found, number) for number in steps]
    built = build_variants(run, found.stage, wanted, read[0].kl_coef)
    pool = pooled([freeze(evidence, settings) for evidence in read])
    batch_groups = max(1, config.prompts_per_step // config.num_mini_batches)
    model, source, exact = start_model(run, found.stage, first)
    seed = derive_seed(run.resolved.config.seed, found.stage, "frozen")
    made = measure(
        pool,
        gradient_sketch(model, pool, how.directions, seed),
        built.variants,
        batch_groups=batch_groups,
        batches=how.batches,
        seed=seed,
    )
    notes = [*built.notes, *_notes(made, steps, source, exact, _drift(model, pool))]
    return Report(
        f"variants on the rollouts of steps {_span(steps)} of stage {found.stage}, "
        f"run {run.short_id}",
        notes,
        _parts(made),
        {
            "run_id": run.record.run_id,
            "stage": found.stage,
            "steps": steps,
            "policy": source,
            "groups": made.groups,
            "batch_groups": made.batch_groups,
            "batches": made.batches,
            "directions": how.directions,
            "limit": made.limit,
            "variants": [asdict(quality) for quality in made.qualities],
            "predictions": [asdict(p) | {"verdict": p.verdict} for p in made.predictions],
            "notes": notes,
        },
    )


def _every_aggregator(run: PastRun, stage: str, wanted: Wanted) -> Wanted:
    own = run.rl_stage(stage).aggregator.name
    names = sorted(entry.name for entry in run.manager.entries("aggregator"))
    specs = [parse_spec("--aggregation", name) for name in names if name != own]
    return Wanted(aggregators=specs, without_kl=wanted.without_kl)


def _span(steps: Sequence[int]) -> str:
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"


def _drift(model: PreTrainedModel, pool: FrozenStep) -> float:
    """Mean |difference|, nats, of the model's log-probs to those that the pool's updates read."""
    settings = pool.settings
    out = forward_only(model, pool.batch, settings.micro_batch_size, settings.temperature)
    gaps = (out.logprobs - pool.logprobs)[pool.tokens & pool.read[:, None]].abs()
    return float(gaps.mean()) if gaps.numel() else 0.0


def _notes(
    made: QualityReport, steps: Sequence[int], source: str, exact: bool, drift: float
) -> list[str]:
    notes = [
        f"derivatives are at {source}"
        + ("" if exact else f", the nearest on disk to where step {steps[0]} began"),
    ]
    if drift > 0.01:
        notes.append(
            f"the pool's log-probs lie {drift:.2g} nats per token from that policy's (its steps "
            "are of policies that came later): the ranking is of their mixture; a smaller --pool "
            "is nearer, and a run with a learning rate of 1e-12 samples one policy alone"
        )
    if made.groups < 4 * made.batch_groups:
        notes.append(
            f"the pool has {made.groups} groups, less than four batches of {made.batch_groups}: "
            "intervals are wide, and a larger --pool narrows them"
        )
    if made.limit is None or made.limit < 0.5:
        limit = "unknown" if made.limit is None else f"{made.limit:.2f}"
        notes.append(
            f"the policy gradients of the pool's two halves have a cosine of {limit}: the "
            "reference is mostly noise, and only large differences mean something"
        )
    return notes


_ABOUT = (
    "the best aligned first. alignment: mean cosine of a batch's gradient with the policy gradient "
    "of the other half of the pool; direction: the same of the mean gradient, corrected for the "
    "noise of both, and bias = sqrt(1 - direction^2); noise: variance of a batch's gradient over "
    "|mean|^2; snr = 1 / noise; "
    "tokens: how many a batch needs for snr 1"
)


def _parts(made: QualityReport) -> list[Table | Picture]:
    from posttrain.core.analysis.pictures import bars

    about = f"{_ABOUT}; {made.groups} groups, {made.batches} batches of {made.batch_groups}" + (
        "" if made.limit is None else f"; cosine of the halves' references {made.limit:.3f}"
    )
    shown = {
        q.label: {"alignment": q.alignment, "direction": q.direction}
        for q in made.qualities
        if q.alignment is not None and q.direction is not None
    }
    renamed = {"label": "variant", "tokens_for_snr_1": "tokens"}
    return [
        table(
            "gradients of batches against the policy gradient",
            [{renamed.get(n, n): v for n, v in asdict(q).items()} for q in made.qualities],
            about,
        ),
        table(
            f"predictions, next to '{OWN}'",
            [
                {
                    "variant": p.second,
                    "gain": p.gain,
                    "low": p.low,
                    "high": p.high,
                    "predicted": p.verdict,
                }
                for p in made.predictions
                if p.first == OWN
            ],
            f"gain: alignment less that of '{OWN}' on the same batches, with its 95 % interval; "
            "predicted: which learns faster, if the first step's gain decides; tested, 7 of 26 "
            "such predictions came true (docs/token-weights.md); --json has all pairs",
        ),
        Picture("alignment and direction", bars(shown, "cosines with the policy gradient", "")),
    ]
