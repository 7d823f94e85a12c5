"""How well each variant's gradient, on batches of recorded steps, follows the policy gradient.

The reference is the gradient of the expected reward by REINFORCE with the mean of a group's other
responses as baseline, which is unbiased, on one half of the pool's groups; batches are drawn from
the other half, and the halves change places. So a batch is never compared with itself.
Gradients are sketched: a token's is its slopes along K random directions.
Axes: B rows, T response tokens, K directions, R batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from posttrain.core.analysis.frozen import FrozenMini, FrozenStep, Variant, evaluate
from posttrain.core.analysis.statistics import bounded
from posttrain.core.batch import COLUMN_AXES, NOT_COLUMNS, RolloutBatch
from posttrain.core.errors import ConfigError
from posttrain.core.math.masking import masked
from posttrain.core.models.sharded import put_away
from posttrain.core.runtime.seeding import generator
from posttrain.core.training.natural_gradient import Fisher

LEAST_GROUPS = 4
"""Of the pool, so that each half has two."""


@dataclass(frozen=True, slots=True)
class GradientQuality:
    """One variant. None where its gradient is 0.

    `alignment` is the mean cosine of a batch's gradient with the policy gradient: what a step of
    fixed length gains at first. `direction` is the cosine of the mean gradient with it, corrected
    for the noise of both by what the halves agree in (Spearman; 1 at most), and `bias` the part of
    the mean gradient at right angles to it, sqrt(1 - direction^2). `noise` is the variance of a
    batch's gradient over the squared length of the mean, `snr` its inverse, and `tokens_for_snr_1`
    how many tokens a batch needs for as much signal as noise.
    """

    label: str
    alignment: float | None
    direction: float | None
    bias: float | None
    noise: float | None
    snr: float | None
    tokens_for_snr_1: float | None


@dataclass(frozen=True, slots=True)
class Prediction:
    """How `second` will learn next to `first`: by the alignment that it has more, `gain`.

    It is between `low` and `high` (95 %), from differences on the same batches.
    """

    first: str
    second: str
    gain: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """In words, of `second`."""
        return "faster" if self.low > 0 else "slower" if self.high < 0 else "no difference seen"


@dataclass(frozen=True, slots=True)
class QualityReport:
    """All variants, the best aligned first, and a prediction for each pair of them.

    `limit` is the cosine of the halves' references: no variant can be seen to be better aligned
    than about its square root.
    """

    qualities: tuple[GradientQuality, ...]
    predictions: tuple[Prediction, ...]
    groups: int
    batch_groups: int
    batches: int
    limit: float | None


def policy_gradient_weights(step: FrozenStep) -> Tensor:
    """d loss / d log-prob [B, T] of REINFORCE, a mean over responses; unscored ones are left out.

    The baseline of a response is the mean reward of the others of its group; a response without
    others has that of all rows.
    """
    batch = step.batch
    rewards, tokens = batch.column("rewards").double(), batch.mask.bool()
    counted = tokens.any(dim=1) & rewards.isfinite()
    baseline = torch.full_like(rewards, float(rewards[counted].mean()) if counted.any() else 0.0)
    for rows in batch.groups():
        rows = rows[counted[rows]]
        if len(rows) > 1:
            baseline[rows] = (rewards[rows].sum() - rewards[rows]) / (len(rows) - 1)
    pull = torch.where(counted, baseline - rewards, 0.0) / max(1, int(counted.sum()))
    return masked(pull[:, None].expand(tokens.shape), tokens & counted[:, None])


def measure(
    pool: FrozenStep,
    sketch: Tensor,
    variants: Sequence[Variant],
    *,
    batch_groups: int,
    batches: int,
    seed: int,
) -> QualityReport:
    """Draw `batches` of `batch_groups` groups with replacement and compare; `sketch` is [B, T, K].

    Raises `ConfigError` for a pool of fewer than four groups, and as `evaluate` does.
    """
    groups = list(pool.batch.groups())
    if len(groups) < LEAST_GROUPS:
        raise ConfigError(
            f"the recorded steps have {len(groups)} groups, and {LEAST_GROUPS} are needed (half of "
            "them for the reference): take more steps with --pool"
        )
    draw = generator(seed, "gradient_quality")
    order = torch.randperm(len(groups), generator=draw).tolist()
    halves = [order[0::2], order[1::2]]
    weights = policy_gradient_weights(pool)
    references = [_reference(weights, sketch, [groups[i] for i in half]) for half in halves]
    found: dict[str, list[tuple[Tensor, Tensor]]] = {v.label: [] for v in variants}
    tokens = 0
    for own, reference in zip(halves, reversed(references), strict=True):
        gradients: dict[str, list[Tensor]] = {v.label: [] for v in variants}
        for _ in range(max(1, batches // 2)):
            chosen = torch.randint(len(own), (batch_groups,), generator=draw).tolist()
            step, rows = drawn(pool, [groups[own[i]] for i in chosen])
            tokens += int(step.tokens.sum())
            for variant in variants:
                # A loss descends, so the direction in which the policy goes is its negative.
                pull = -evaluate(step, variant).weights.double()
                gradients[variant.label].append(_gradient(pull, sketch[rows]))
        for label, several in gradients.items():
            found[label].append((torch.stack(several), reference))
    drawn_batches = 2 * max(1, batches // 2)
    cosines = {label: _cosines(halves) for label, halves in found.items()}
    qualities = [
        _quality(label, halves, cosines[label], tokens / drawn_batches)
        for label, halves in found.items()
    ]
    qualities.sort(key=lambda q: -math.inf if q.alignment is None else q.alignment, reverse=True)
    # Batches that share groups are not independent: their mean is as sure as that of the pool.
    independent = min(float(drawn_batches), max(1.0, len(groups) / batch_groups))
    predictions = [
        _prediction(a, b, cosines[b] - cosines[a], independent) for a, b in combinations(cosines, 2)
    ]
    return QualityReport(
        tuple(qualities),
        tuple(predictions),
        len(groups),
        batch_groups,
        drawn_batches,
        _cosine(*references),
    )


def _prediction(first: str, second: str, gaps: Tensor, independent: float) -> Prediction:
    width = 1.96 * float(gaps.std()) / math.sqrt(independent)
    gain = float(gaps.mean())
    return Prediction(first, second, gain, gain - width, gain + width)


def _gradient(weights: Tensor, sketch: Tensor) -> Tensor:
    return torch.einsum("bt,btk->k", weights, sketch.double())


def _reference(weights: Tensor, sketch: Tensor, groups: Sequence[Tensor]) -> Tensor:
    rows = torch.cat(list(groups))
    return _gradient(-weights[rows], sketch[rows])


def _cosine(a: Tensor, b: Tensor) -> float | None:
    norms = float(a.norm() * b.norm())
    return bounded(float(a @ b) / norms) if norms > 0 else None


def _cosines(halves: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Cosine [R] of each batch's gradient with its reference; 0 for one without a gradient."""
    found = []
    for gradients, reference in halves:
        norms = gradients.norm(dim=1) * reference.norm()
        found.append(torch.where(norms > 0, gradients @ reference / norms.clamp(min=1e-300), 0.0))
    return torch.cat(found)


def _direction(means: Sequence[Tensor], references: Sequence[Tensor]) -> float | None:
    """Cosine of a mean gradient with the policy gradient, had neither noise; None if all is noise.

    `references` are those of the other half. Source: Spearman 1904, correction for attenuation.
    """
    seen = [_cosine(mean, reference) for mean, reference in zip(means, references, strict=True)]
    agree = [_cosine(*means), _cosine(*references)]
    known = [cosine for cosine in (*seen, *agree) if cosine is not None]
    if len(known) < 4 or min(known[2:]) <= 0:
        return None
    return bounded((known[0] + known[1]) / 2 / math.sqrt(known[2] * known[3]))


def _quality(
    label: str,
    halves: Sequence[tuple[Tensor, Tensor]],
    cosines: Tensor,
    tokens: float,
) -> GradientQuality:
    means = [gradients.mean(dim=0) for gradients, _ in halves]
    signal = sum(float(mean.square().sum()) for mean in means) / len(means)
    if signal == 0:
        return GradientQuality(label, None, None, None, None, None, None)
    noise = sum(
        float((gradients - mean).square().sum(dim=1).mean())
        for (gradients, _), mean in zip(halves, means, strict=True)
    ) / len(means)
    direction = _direction(means, [reference for _, reference in halves])
    return GradientQuality(
        label,
        alignment=float(cosines.mean()),
        direction=direction,
        bias=None if direction is None else math.sqrt(max(0.0, 1 - direction**2)),
        noise=noise / signal,
        snr=signal / noise if noise > 0 else None,
        tokens_for_snr_1=tokens * noise / signal,
    )


# --- a pool of groups, and batches drawn from it --------------------------------------------------

_NUMBERED = ("group_id", "episode_id", "node_id")
"""Columns of numbers that mean something within a batch alone."""
_ABSENT = {"step_end": -1, "turn_end": -1, "step_score": float("nan"), "turn_reward": float("nan")}
_OF_TEACHERS = ("teacher_topk", "teacher_prompt", "teacher_response", "text_group", "teacher_text")


def pooled(steps: Sequence[FrozenStep]) -> FrozenStep:
    """All rows of `steps` as one step of one mini-batch, with the columns that all of them have.

    Texts and what teachers read are left out. Numbers of groups are made distinct.
    """
    names = set.intersection(*(step.batch.columns() for step in steps))
    names -= {name for name in names if name.startswith(_OF_TEACHERS)}
    columns: dict[str, Any] = dict.fromkeys(COLUMN_AXES)  # Any: `replace` checks each field's type
    for name in names:
        columns[name] = _stacked(name, [step.batch.column(name) for step in steps])
    columns |= dict.fromkeys(NOT_COLUMNS, ())
    batch = replace(steps[0].batch, **columns)
    known = [step.entropy for step in steps if step.entropy is not None]
    return _whole(
        replace(
            steps[0],
            logprobs=_stacked("logprobs", [step.logprobs for step in steps]),
            entropy=_stacked("entropy", known) if len(known) == len(steps) else None,
            read=torch.cat([step.read for step in steps]),
        ),
        batch,
    )


def drawn(pool: FrozenStep, groups: Sequence[Tensor]) -> tuple[FrozenStep, Tensor]:
    """A step of one mini-batch from the rows of each of `groups`, and these rows [n] of the pool.

    A group that is drawn twice is two groups.
    """
    rows = torch.cat(list(groups))
    draw = torch.repeat_interleave(
        torch.arange(len(groups)), torch.tensor([len(group) for group in groups])
    )
    batch = pool.batch.select(rows)
    own = {"group_id": draw, "seq_id": torch.arange(len(rows))}
    for name in _NUMBERED[1:]:
        if (column := getattr(batch, name)) is not None:
            shift = draw.view(-1, *[1] * (column.dim() - 1)) * (int(column.max()) + 1)
            own[name] = torch.where(column >= 0, column + shift, column)
    step = replace(
        pool,
        logprobs=pool.logprobs[rows],
        entropy=None if pool.entropy is None else pool.entropy[rows],
        read=pool.read[rows],
    )
    return _whole(step, batch.with_columns(**own)), rows


def _whole(step: FrozenStep, batch: RolloutBatch) -> FrozenStep:
    rows = torch.arange(len(batch))
    mini = FrozenMini(0, rows, torch.ones(len(batch), dtype=torch.bool))
    return replace(step, batch=batch, minis=(mini,))


def _stacked(name: str, parts: Sequence[Tensor]) -> Tensor:
    """The rows of all `parts`, padded to the widest: prompts on the left, all else on the right."""
    width = max(part.shape[1] for part in parts) if parts[0].dim() > 1 else 0
    shift, found = 0, []
    for part in parts:
        if name in _NUMBERED:
            lowest = part >= 0
            part = torch.where(lowest, part + shift, part)
            shift = max(shift, int(part.max()) + 1)
        if part.dim() > 1 and part.shape[1] < width:
            extra = width - part.shape[1]
            sides = (extra, 0) if name.startswith("prompt_") else (0, extra)
            part = functional.pad(part, sides, value=_ABSENT.get(name, 0))
        found.append(part)
    return torch.cat(found)


# --- gradients in few numbers ---------------------------------------------------------------------


def gradient_sketch(model: PreTrainedModel, step: FrozenStep, directions: int, seed: int) -> Tensor:
    """Slopes [B, T, K] of each token's log-prob along K random directions; 0 where no loss is.

    The directions are normal with variance 1 / K. A gradient of the parameters is the sum over
    tokens of (d loss / d log-prob) times (the token's slopes), and products of such sums are those
    of the gradients themselves, but for a relative error of about sqrt(2 / K)
    (Johnson-Lindenstrauss). So any loss on any of the tokens costs no further pass of the model.
    """
    batch, settings = step.batch, step.settings
    trained = [p for p in model.parameters() if p.requires_grad]
    size = sum(p.numel() for p in trained)
    fisher = Fisher(model, [], temperature=settings.temperature)
    found = torch.zeros(*batch.mask.shape, directions)
    draw = torch.Generator().manual_seed(seed)
    parts = [rows for rows in settings.micro_rows(batch) if bool(batch.mask[rows].any())]
    for place in range(directions):
        vector = torch.randn(size, generator=draw).div_(directions**0.5)
        vector = vector.to(trained[0].device, trained[0].dtype)
        for rows in parts:
            micro = batch.select(rows)
            chosen = micro.mask.bool()
            slopes = torch.zeros(chosen.shape)
            slopes[chosen] = fisher.logprob_slopes(micro, chosen, vector).float().cpu()
            found[rows, :, place] = slopes
    put_away(model)
    return found
