"""A step of a run, frozen, and what another way of learning makes of it.

Nothing is sampled and no model is run: the log-probs are those that the run's own update read.
Axes: B rows, T response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from posttrain.core.analysis.evidence import StepEvidence
from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import AdvantageEstimator, AdvantageTransform, KlEstimator
from posttrain.core.errors import ConfigError, RunError
from posttrain.core.math.masking import masked, row_means
from posttrain.core.rewards.shaping import place_on_last_token, subtract_kl
from posttrain.core.runtime.seeding import generator
from posttrain.core.training.metrics import MetricSums
from posttrain.core.training.objective import Objective, PreparedMini, positive_share
from posttrain.core.training.splitting import mini_rows
from posttrain.core.training.teachers import transformed
from posttrain.core.training.updates import UpdateSettings

_FILLED_BY = {
    "values": "a stage with a critic fills it",
    "bootstrap_value": "a stage with a critic fills it",
    "ref_logprobs": "a stage whose kl.controller has a coefficient above 0 fills it, and --no-kl "
    "compares without KL",
    "baseline_reward": "a stage whose advantage is remax fills it",
    "teacher_logprobs": "a stage that learns from a teacher fills it",
    "process_rewards": "a stage with an implicit process reward model fills it",
    "sum_pi_squared": "a stage whose advantage is optimal_token_baseline fills it",
    "node_id": "a stage whose sampler makes trees fills it",
    "step_end": "a stage with a reward that scores steps fills it",
    "step_score": "a stage with a reward that scores steps fills it",
    "entropy": "a stage with several updates per batch fills it, or skip_idle_rows: false",
    "old_logprobs": "with rollout_correction.bypass_old the run never computed it",
}


@dataclass(frozen=True, slots=True)
class FrozenMini:
    """A mini-batch: its number on the batch, all its `rows` [n], and those `taken` [n] (bool).

    Counts are of all rows. A row is taken from the mini-batch that read it last, so that each row
    of the batch is taken once.
    """

    number: int
    rows: Tensor
    taken: Tensor


@dataclass(frozen=True, slots=True)
class FrozenStep:
    """`logprobs` [B, T] are those the update computed its loss from, `read` [B] where it did.

    Rows that it did not read (their advantages were 0) have the old policy's log-probs, or the
    engine's where the update would have computed these. `entropy`
    [B, T] is None where it is not known of every row.
    """

    step: int
    batch: RolloutBatch
    logprobs: Tensor
    entropy: Tensor | None
    read: Tensor
    minis: tuple[FrozenMini, ...]
    settings: UpdateSettings

    @property
    def tokens(self) -> Tensor:
        """The tokens [B, T] that may have loss, as a mask."""
        return self.batch.mask.bool()

    def prepare(self, objective: Objective, rows: RolloutBatch, mini: FrozenMini) -> PreparedMini:
        """Counts of the whole mini-batch `rows`, and what losses select in it, as the run drew."""
        draw = generator(self.settings.seed, "prepare", self.step, mini.number)
        return objective.prepare(rows, draw, len(self.settings.micro_rows(rows)), self.step)


def freeze(evidence: StepEvidence, settings: UpdateSettings) -> FrozenStep:
    """Cut the evidence up as the run did; `settings` are of its config.

    Raises `RunError` where `seen_by` disagrees: then evidence and config are of two runs.
    """
    batch, tokens = evidence.batch, evidence.batch.mask.bool()
    read = (evidence.seen_by >= 0)[:, None] & tokens
    old = batch.rollout_logprobs
    if batch.old_logprobs is not None:
        # The only update left idle rows out, and their log-probs 0: the engine's stand for them.
        empty = (evidence.seen_by < 0) & (masked(batch.old_logprobs, tokens) == 0).all(dim=1)
        old = torch.where(empty[:, None], old.to(batch.old_logprobs), batch.old_logprobs)
        batch = batch.with_columns(old_logprobs=old)
    known = bool((read == tokens).all()) or batch.entropy is not None
    entropy = torch.zeros_like(evidence.seen_entropy) if batch.entropy is None else batch.entropy
    return FrozenStep(
        step=evidence.step,
        batch=batch,
        logprobs=torch.where(read, evidence.seen_logprobs, old.to(evidence.seen_logprobs)),
        entropy=torch.where(read, evidence.seen_entropy, entropy) if known else None,
        read=evidence.seen_by >= 0,
        minis=_minis(evidence, settings),
        settings=settings,
    )


def _minis(evidence: StepEvidence, settings: UpdateSettings) -> tuple[FrozenMini, ...]:
    """The mini-batches that some row is taken from, by the numbers in `seen_by`."""
    batch, seen_by, step = evidence.batch, evidence.seen_by, evidence.step
    epochs, count = settings.epochs, settings.num_mini_batches
    parts = list(mini_rows(batch, epochs, count, settings.seed, "mini_batches", step))
    owner = torch.full((len(batch),), -1)
    for number, rows in enumerate(parts):
        owner[rows] = number  # the last that holds it
    owner = torch.where(seen_by >= 0, seen_by, owner)
    taken = [owner[rows] == number for number, rows in enumerate(parts)]
    minis = [FrozenMini(i, rows, taken[i]) for i, rows in enumerate(parts) if taken[i].any()]
    if sum(int(mini.taken.sum()) for mini in minis) != len(batch):
        raise RunError(
            f"step {step} was not cut into mini-batches as these settings would cut it ({epochs} "
            f"epochs of {count} mini-batches, seed {settings.seed}), as its column seen_by shows: "
            "the evidence is of another stage or config, or was changed; compute the stage again "
            "with --no-cache"
        )
    return tuple(minis)


@dataclass(frozen=True, slots=True)
class Variant:
    """The plugins of one way of learning.

    `kl_coef` is the coefficient of the KL term in the loss. `keeps_token_rewards` and
    `keeps_correction` take these columns as the run made them; else rewards are put on the last
    token again, less `reward_kl`, and the objective's own correction is computed.
    """

    label: str
    estimator: AdvantageEstimator[Any]
    objective: Objective
    kl_coef: float = 0.0
    keeps_token_rewards: bool = True
    reward_kl: tuple[KlEstimator[Any], float] | None = None
    keeps_correction: bool = True
    loses_old_logprobs: bool = False
    transforms: tuple[AdvantageTransform[Any], ...] = ()


@dataclass(frozen=True, slots=True)
class VariantResult:
    """What a variant makes of the step.

    `advantages` and `weights` (d loss / d logprob, each row's in the mini-batch that read it) are
    [B, T]; `loss` and `parts` are means over the mini-batches; `metrics` are means over tokens or
    rows, the loss's own names (`clip/high_frac`).
    """

    label: str
    advantages: Tensor
    weights: Tensor
    loss: float
    parts: Mapping[str, float]
    metrics: Mapping[str, float] = field(default_factory=dict)

    def row_advantages(self, mask: Tensor) -> Tensor:
        """Mean advantage [B] over each row's tokens in `mask` [B, T]; 0 for a row without any."""
        return row_means(self.advantages, mask)


def evaluate(step: FrozenStep, variant: Variant) -> VariantResult:
    """Advantages, loss and weights of `variant`; raises `ConfigError` naming a missing column."""
    batch = prepared_batch(step, variant)
    weights = torch.zeros_like(step.logprobs)
    # Zeros where it is not known and, as was checked, nothing reads it.
    entropy = torch.zeros_like(step.logprobs) if step.entropy is None else step.entropy
    totals: list[float] = []
    parts, metrics = MetricSums(), MetricSums()
    for mini in step.minis:
        rows = batch.select(mini.rows)
        logprobs = step.logprobs[mini.rows].clone().requires_grad_()
        prepared = step.prepare(variant.objective, rows, mini)
        total = torch.zeros(())
        for index in step.settings.micro_rows(rows):
            share = variant.objective.loss(
                logprobs[index],
                entropy[mini.rows[index]],
                rows.select(index),
                prepared.rows(index),
                variant.kl_coef,
            )
            total = total + share.total
            for name, value in share.parts.items():
                parts.add_scalar(name, value)
            for name, value in share.pulls.items():
                metrics.add_scalar(name, value)
            for name, (values, where) in share.tokens.items():
                metrics.add(name, values, where)
        (gradient,) = torch.autograd.grad(total, logprobs)
        weights[mini.rows[mini.taken]] = gradient[mini.taken]
        totals.append(float(total.detach()))
        metrics.add_means(prepared.metrics)
    count = len(step.minis)
    return VariantResult(
        variant.label,
        batch.column("advantages"),
        masked(weights, batch.mask),
        sum(totals) / count,
        {name: value / count for name, value in parts.result().items()},
        positive_share(metrics.result()),
    )


def prepared_batch(step: FrozenStep, variant: Variant) -> RolloutBatch:
    """The step's batch with the columns of `variant`, its advantages among them."""
    objective, batch = variant.objective, step.batch
    if not variant.keeps_correction:
        batch = _without(batch, "is_weight", "correction_mask")
        if objective.bypass_old:
            batch = batch.with_columns(old_logprobs=batch.rollout_logprobs)
    if variant.loses_old_logprobs:
        batch = _without(batch, "old_logprobs")
    if step.entropy is not None:
        batch = batch.with_columns(entropy=step.entropy)
    batch = batch.with_columns(logprobs_now=step.logprobs)
    needs = variant.estimator.required_columns()
    if "agent_id" in needs and batch.agent_id is None:  # one policy speaks in every row
        batch = batch.with_columns(agent_id=torch.zeros(len(batch), dtype=torch.int64))
    _check_columns(step, variant, batch)
    if not variant.keeps_token_rewards:
        dense = place_on_last_token(batch.column("rewards"), batch.response_mask)
        batch = batch.with_columns(token_rewards=dense)
        if variant.reward_kl is not None:
            batch = subtract_kl(batch, *variant.reward_kl)
    corrects = objective.correction is not None and not objective.bypass_old
    if corrects and batch.is_weight is None and batch.correction_mask is None:
        batch, _ = objective.correct(batch)
    estimate = transformed(variant.estimator.estimate(batch), variant.transforms, batch)
    return batch.with_columns(advantages=estimate.advantages)


def _check_columns(step: FrozenStep, variant: Variant, batch: RolloutBatch) -> None:
    """Raise `ConfigError` naming the columns of which nothing is known."""
    objective = variant.objective
    needs = variant.estimator.required_columns() | objective.required_columns()
    needs = needs.union(*(each.required_columns() for each in variant.transforms))
    if objective.correction is not None or objective.needs_prepare():
        needs |= {"old_logprobs"}
    if objective.has_bonus or objective.needs_prepare():
        needs |= {"entropy"}
    in_loss = objective.kl is not None and variant.kl_coef > 0
    if in_loss and objective.kl is not None and objective.kl.from_logits:
        raise ConfigError(
            f"{variant.label} needs the logits of policy and reference (kl '{objective.kl.name}'), "
            f"and the evidence of step {step.step} has log-probs only: --no-kl compares without KL"
        )
    if in_loss or variant.reward_kl is not None:
        needs |= {"ref_logprobs"}
    made_here = {"advantages", "is_weight" if objective.correction is not None else "advantages"}
    missing = sorted(needs - batch.columns() - made_here)
    if missing:
        how = "; ".join(f"{name}: {_FILLED_BY.get(name, 'unknown')}" for name in missing)
        raise ConfigError(
            f"{variant.label} needs the column(s) {', '.join(missing)}, which the evidence of step "
            f"{step.step} does not have ({how}); leave this variant out or compare a step of "
            "another run"
        )


def _without(batch: RolloutBatch, *names: str) -> RolloutBatch:
    nothing: dict[str, Any] = dict.fromkeys(names)  # Any: fields of one dataclass
    return replace(batch, **nothing)
