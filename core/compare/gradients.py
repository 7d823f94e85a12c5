"""The gradient of a model's parameters that a variant takes from a frozen step.

Every mini-batch is computed at the same weights, so it is one gradient at one point: the mean over
the mini-batches, before any clipping of its norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.compare.frozen import FrozenStep
from posttrain.core.compare.variant import Variant, prepare_mini, prepared_batch
from posttrain.core.compare.vectors import bounded
from posttrain.core.models.sharded import put_away
from posttrain.core.training.forward import forward_only, response_logprobs


@dataclass(frozen=True, slots=True)
class GradientDifference:
    """`second` against `first`; the cosine is None where either is 0."""

    first: str
    second: str
    cosine: float | None
    norm_ratio: float | None


def parameter_gradient(model: PreTrainedModel, step: FrozenStep, variant: Variant) -> list[Tensor]:
    """A float32 tensor per trained parameter, on the CPU; leaves no gradient in the model."""
    batch, settings = prepared_batch(step, variant), step.settings
    trained = [p for p in model.parameters() if p.requires_grad]
    model.zero_grad(set_to_none=True)
    for mini in step.minis:
        rows = batch.select(mini.rows)
        prepared = prepare_mini(step, variant, rows, mini)
        for index in settings.micro_rows(rows):
            micro = rows.select(index)
            if not micro.mask.any():
                continue
            out = response_logprobs(model, micro, temperature=settings.temperature)
            loss = variant.objective.loss(
                out.logprobs.cpu(),
                out.entropy.cpu(),
                micro,
                prepared.rows(index),
                variant.kl_coef,
            )
            (loss.total / len(step.minis)).backward()  # type: ignore[no-untyped-call]
    found = [torch.zeros(p.shape) if p.grad is None else p.grad.float().cpu() for p in trained]
    model.zero_grad(set_to_none=True)
    put_away(model)
    return found


def logprob_gap(model: PreTrainedModel, step: FrozenStep) -> float | None:
    """Largest |difference|, nats, of the model's log-probs to those that the first mini-batch read.

    Only there had the policy not moved yet in the step. None when that read no row.
    """
    rows = [mini.rows[mini.taken & step.read[mini.rows]] for mini in step.minis if not mini.number]
    if not rows or not len(rows[0]):
        return None
    chosen, settings = step.batch.select(rows[0]), step.settings
    out = forward_only(model, chosen, settings.micro_batch_size, settings.temperature)
    gaps = (out.logprobs - step.logprobs[rows[0]])[chosen.mask.bool()].abs()
    return float(gaps.max()) if gaps.numel() else None


def gradient_norm(gradient: Sequence[Tensor]) -> float:
    """L2 norm over all parameters, in float64."""
    return math.sqrt(sum(float(part.double().square().sum()) for part in gradient))


def gradient_difference(
    names: tuple[str, str], first: Sequence[Tensor], second: Sequence[Tensor]
) -> GradientDifference:
    """Cosine and ratio of norms of two gradients of the same parameters."""
    norm_a, norm_b = gradient_norm(first), gradient_norm(second)
    dot = sum(
        float(a.double().flatten() @ b.double().flatten())
        for a, b in zip(first, second, strict=True)
    )
    cosine = bounded(dot / norm_a / norm_b) if norm_a and norm_b else None
    return GradientDifference(*names, cosine, norm_b / norm_a if norm_a else None)
