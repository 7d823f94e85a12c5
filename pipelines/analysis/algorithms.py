"""`compare --step`: algorithms on one frozen step of a run, as a report.

All variants have the step's rollouts, rewards and log-probs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.analysis.compare import (
    GradientDifference,
    PairResult,
    TokenGap,
    compare_pair,
    gradient_difference,
    gradient_norm,
    logprob_gap,
    parameter_gradient,
)
from posttrain.core.analysis.evidence import StepEvidence
from posttrain.core.analysis.frozen import FrozenStep, Variant, VariantResult, evaluate, freeze
from posttrain.core.analysis.report import Picture, Report, Row, Table, shortened, table
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.errors import ConfigError
from posttrain.core.models.device import set_threads
from posttrain.core.store.artifacts import Artifact
from posttrain.core.training.checkpoint import CRITIC, load_checkpoint
from posttrain.pipelines.analysis.past_run import (
    PastRun,
    check_step,
    read_unchanged,
    require_logprobs,
)
from posttrain.pipelines.analysis.variants import OWN, Wanted, build_variants
from posttrain.pipelines.rl.build import build_critic, build_learner, update_settings


@dataclass(frozen=True, slots=True)
class ModelGradients:
    """Parameter gradients at one policy; `logprob_gap` (nats) is to what the step's update read."""

    source: str
    exact: bool
    logprob_gap: float | None
    norms: dict[str, float]
    pairs: tuple[GradientDifference, ...]


@dataclass(slots=True)
class _Comparison:
    """`advantage_gap` is that of the run's own advantages to those it trained on."""

    evidence: StepEvidence
    frozen: FrozenStep
    results: list[VariantResult]
    pairs: list[PairResult]
    advantage_gap: float
    gradients: ModelGradients | None = None
    notes: list[str] = field(default_factory=list)


def compare_algorithms(
    run: PastRun, stage: str | None, step: int, wanted: Wanted, *, with_model: bool
) -> Report:
    """The variants asked for, next to the run's own loss, on `step`.

    Raises `ConfigError` for a step, plugin or combination that does not exist, or a variant whose
    columns are missing; `ResourceError` and `RunError` as for the evidence.
    """
    found = run.evidence(stage)
    check_step(found, step)
    if not wanted.any:
        raise ConfigError(
            "--step compares algorithms, and none was named: add --algorithm NAME (several times "
            "for several), --advantage, --loss, --aggregation or --clip, or --frozen to rank "
            "all aggregators"
        )
    evidence = read_unchanged(found, step)
    require_logprobs(evidence)
    built = build_variants(run, found.stage, wanted, evidence.kl_coef)
    there, config = run.stage_inputs(found.stage, run.resolved, {}), run.rl_stage(found.stage)
    set_threads(run.resolved.config.limits.num_threads)
    frozen = freeze(evidence, update_settings(there, config, step))
    results = [evaluate(frozen, variant) for variant in built.variants]
    made = _Comparison(
        evidence,
        frozen,
        results,
        [compare_pair(a, b, frozen.tokens) for a, b in combinations(results, 2)],
        _largest((results[0].advantages - evidence.batch.column("advantages"))[frozen.tokens]),
        notes=[*built.notes, *_notes(frozen, config)],
    )
    if made.advantage_gap > 1e-6:
        made.notes.append(
            f"the advantages of '{OWN}' differ by up to {made.advantage_gap:.3g} from those the "
            "run trained on: its estimator remembers earlier steps, or its plugins have changed"
        )
    if with_model:
        made.gradients = _gradients(run, found.stage, frozen, built.variants)
        if not made.gradients.exact:
            made.notes.append(
                f"parameter gradients are at {made.gradients.source}, not at the policy that step "
                f"{step} started from, which was not kept: run with --set keep.every=1 to keep it"
            )
    return Report(
        f"algorithms on step {step} of stage {found.stage}, run {run.short_id}",
        made.notes,
        _parts(made),
        {"run_id": run.record.run_id, "stage": found.stage} | _values(made),
    )


def _largest(gaps: Tensor) -> float:
    return float(gaps.abs().max()) if gaps.numel() else 0.0


def _notes(frozen: FrozenStep, config: RlStage) -> list[str]:
    notes = []
    unread = int((frozen.tokens.any(dim=1) & ~frozen.read).sum())
    if unread:
        notes.append(
            f"{unread} of {len(frozen.batch)} responses were not read by the run's update (their "
            "advantages were 0, or it stopped early): the old policy's log-probs stand for them"
        )
    moved = (frozen.logprobs - frozen.batch.column("old_logprobs"))[frozen.tokens]
    if moved.numel() and _largest(moved) == 0.0:
        notes.append(
            "every log-prob is still the old policy's (one update per batch), so all ratios are 1 "
            "and no clip can act: losses that differ only in their clip are equal here"
        )
    if config.resample is not None:
        notes.append("the run resampled rows by reward: groups are those after resampling")
    if config.distillation is not None:  # no variant changes its values
        notes.append(
            f"the distillation loss {config.distillation.name} is in none of these numbers: they "
            "are of policy losses; `posttrain inspect` shows what it gave each token"
        )
    return notes


# --- parameter gradients -------------------------------------------------------------------------


def _gradients(
    run: PastRun, stage: str, frozen: FrozenStep, variants: Sequence[Variant]
) -> ModelGradients:
    model, source, exact = start_model(run, stage, frozen.step)
    found = {variant.label: parameter_gradient(model, frozen, variant) for variant in variants}
    return ModelGradients(
        source,
        exact,
        logprob_gap(model, frozen),
        {label: gradient_norm(gradient) for label, gradient in found.items()},
        tuple(gradient_difference((a, b), found[a], found[b]) for a, b in combinations(found, 2)),
    )


def start_model(run: PastRun, name: str, step: int) -> tuple[PreTrainedModel, str, bool]:
    """The policy nearest to the start of `step`, where it is from, and whether it is exactly that.

    It is the stage's input, a checkpoint, or the trained model. Raises `ResourceError` when the
    input is gone, `RunError` for a checkpoint that cannot be read.
    """
    stage, checkpoints = run.rl_stage(name), dict(run.checkpoints(name))
    # With an adapter the result does not hold the weights that were trained.
    result = None if stage.lora else run.store.lookup(name, run.record.stages[name])[0]
    if result is not None and not result.artifacts:  # an imported run made no model
        result = None
    known = {0, *checkpoints, *(() if result is None else (stage.steps,))}
    after = min(known, key=lambda number: (abs(number - (step - 1)), number))
    inputs, source = run.inputs(name), "the stage's input model"
    checkpoint = None
    if result is not None and after == stage.steps:
        inputs["model"] = result.artifact(stage.makes)
        source = f"the stage's trained model, after step {after}"
    elif after:
        checkpoint, source = checkpoints[after], f"the checkpoint after step {after}"
    return _load(run, name, inputs, checkpoint), source, after == step - 1


def _load(
    run: PastRun, name: str, inputs: Mapping[str, Artifact], checkpoint: Path | None
) -> PreTrainedModel:
    """The policy as the stage trains it, from its input model or, on top of that, a checkpoint."""
    there = run.stage_inputs(name, run.resolved, inputs)
    stage = there.stage
    assert isinstance(stage, RlStage)
    learner = build_learner(there, stage, there.tokenizer())
    if checkpoint is not None:
        critic = build_critic(there, stage)
        others = {} if critic is None else {CRITIC: critic.stored}
        load_checkpoint(checkpoint, learner.stored, others)
    learner.stored.close()  # of bfloat16 weights it takes the gradients away, for its masters
    return learner.model


# --- the report ----------------------------------------------------------------------------------


def _values(made: _Comparison) -> dict[str, object]:
    """The JSON: everything but the tokens themselves, and responses' mean advantages."""
    mask = made.frozen.batch.mask
    return {
        "step": made.frozen.step,
        "responses": len(made.frozen.batch),
        "tokens": int(made.frozen.tokens.sum()),
        "notes": made.notes,
        "advantage_gap": made.advantage_gap,
        "variants": [
            {
                "label": result.label,
                "loss": result.loss,
                "parts": dict(result.parts),
                "metrics": dict(result.metrics),
                "weight_norm": float(result.weights.double().norm()),
                "advantages": result.row_advantages(mask).tolist(),
            }
            for result in made.results
        ],
        "pairs": [
            asdict(pair) | {"largest": [asdict(gap) | _token(made, gap) for gap in pair.largest]}
            for pair in made.pairs
        ],
        "gradients": None if made.gradients is None else asdict(made.gradients),
    }


def _token(made: _Comparison, gap: TokenGap) -> dict[str, str | None]:
    batch = made.evidence.batch
    token = int(batch.response_ids[gap.row, gap.column])
    prompt = batch.problems[gap.row].prompt if batch.problems else None
    return {"token": made.evidence.token_text(token), "prompt": prompt}


def _parts(made: _Comparison) -> list[Table | Picture]:
    own = made.results[0].label
    shown = ("clip/", "ratio/", "contrib/")
    return [
        table(
            "variants",
            [_variant_row(made.frozen, result) for result in made.results],
            f"{len(made.frozen.batch)} responses, {int(made.frozen.tokens.sum())} tokens; a weight "
            "is d loss / d log-prob of a token; losses are means over the step's mini-batches",
        ),
        table(
            "clip fractions and ratios",
            [
                {"variant": r.label} | {n: v for n, v in r.metrics.items() if n.startswith(shown)}
                for r in made.results
            ],
            "means over tokens with loss (clip/seq_frac: over responses); - where a loss has none",
        ),
        table(
            "token weights, pair by pair",
            [
                {
                    "first": pair.first,
                    "second": pair.second,
                    "cosine": pair.weights.cosine,
                    "norm ratio": pair.weights.norm_ratio,
                    "sign differs": pair.weights.sign_differs,
                    "opposite sign": pair.weights.opposite,
                    "advantage rank": pair.advantage_rank,
                }
                for pair in made.pairs
            ],
            "over tokens with loss: norm of the second over the first; shares are of tokens that "
            "either weighs; advantage rank is Spearman's rho over responses",
        ),
        *(() if made.gradients is None else _gradient_tables(made.gradients)),
        *(_largest_table(made, pair) for pair in made.pairs if pair.first == own),
        *_pictures(made),
    ]


def _variant_row(frozen: FrozenStep, result: VariantResult) -> Row:
    advantages = result.row_advantages(frozen.batch.mask)[frozen.tokens.any(dim=1)]
    known = advantages.numel() > 0
    return {
        "variant": result.label,
        "loss": result.loss,
        "policy term": result.parts.get("loss/policy"),
        "KL term": result.parts.get("loss/kl"),
        "mean advantage": float(advantages.mean()) if known else None,
        "largest |advantage|": float(advantages.abs().max()) if known else None,
        "responses with advantage": int((advantages != 0).sum()),
        "norm of weights": float(result.weights.double().norm()),
        "tokens with weight": int((result.weights[frozen.tokens] != 0).sum()),
    }


def _gradient_tables(found: ModelGradients) -> list[Table]:
    where = f"at {found.source}" + ("" if found.exact else " (not where the step began)")
    if found.logprob_gap is not None:
        where += f"; its log-probs differ by up to {found.logprob_gap:.2g} nats from those read"
    if found.exact:
        where += "; where a step begins every ratio is 1, so that no clip can act"
    norms: list[Row] = [{"variant": label, "norm": norm} for label, norm in found.norms.items()]
    pairs = [asdict(pair) for pair in found.pairs]
    return [
        table("parameter gradients", norms, where),
        table("parameter gradients, pair by pair", pairs, where),
    ]


def _largest_table(made: _Comparison, pair: PairResult) -> Table:
    rows: list[Row] = []
    for gap in pair.largest:
        found = _token(made, gap)
        rows.append(
            {
                "response": gap.row,
                "token number": gap.column,
                "token": f"{found['token']!r}",
                "prompt": shortened(found["prompt"] or "", 60),
                pair.first: gap.first,
                pair.second: gap.second,
            }
        )
    title = f"tokens weighed most differently: {pair.first} and {pair.second}"
    return table(title, rows, "d loss / d log-prob, by |difference|")


def _pictures(made: _Comparison) -> list[Picture]:
    from posttrain.core.analysis.pictures import bars, histogram, scatter

    first, others = made.results[0], made.results[1:]
    kept = made.frozen.tokens
    advantages = {
        result.label: result.row_advantages(made.frozen.batch.mask)[kept.any(dim=1)].tolist()
        for result in made.results
    }
    points = {r.label: (advantages[first.label], advantages[r.label]) for r in others}
    clips = {r.label: {n: v for n, v in r.metrics.items() if "clip/" in n} for r in made.results}
    gaps = {
        f"{result.label} - {first.label}": (result.weights - first.weights)[kept].tolist()
        for result in others
    }
    return [
        Picture(
            "advantages",
            scatter(points, "advantage of each response", first.label, "variant"),
            "each dot is a response's mean advantage, against that of the run's own; grey: equal",
        ),
        Picture("clip fractions", bars(clips, "clip fractions", "share of tokens")),
        Picture(
            "differences of token weights",
            histogram(gaps, "variant minus run", "difference of d loss / d log-prob"),
            "over all tokens with loss",
        ),
    ]
