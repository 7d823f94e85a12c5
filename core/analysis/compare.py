"""How the variants of a frozen step differ: token weights, advantages, parameter gradients.

Every mini-batch is computed at the same weights, so a parameter gradient is one gradient at one
point: the mean over the mini-batches, before any clipping of its norm. Sums are in float64.
Axes: B rows, T response tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.analysis.frozen import FrozenStep, Variant, VariantResult, prepared_batch
from posttrain.core.analysis.statistics import bounded, rank_correlation
from posttrain.core.models.sharded import put_away
from posttrain.core.training.forward import forward_only, response_logprobs


@dataclass(frozen=True, slots=True)
class VectorDifference:
    """`second` against `first`; None where a vector is 0 and the quantity does not exist.

    `norm_ratio` is |second| / |first|. `sign_differs` is the share of the places at which either is
    not 0 where their signs (+, -, 0) differ; `opposite` the share where one is + and the other -.
    """

    cosine: float | None
    norm_ratio: float | None
    sign_differs: float | None
    opposite: float | None


def vector_difference(first: Tensor, second: Tensor) -> VectorDifference:
    """Direction, length and signs of two vectors [N]."""
    a, b = first.double(), second.double()
    norm_a, norm_b = float(a.norm()), float(b.norm())
    either = (a != 0) | (b != 0)
    count = int(either.sum())
    differs, opposite = a.sign() != b.sign(), a.sign() * b.sign() < 0
    return VectorDifference(
        cosine=bounded(float(a @ b) / norm_a / norm_b) if norm_a and norm_b else None,
        norm_ratio=norm_b / norm_a if norm_a else None,
        sign_differs=int(differs.sum()) / count if count else None,
        opposite=int(opposite.sum()) / count if count else None,
    )


def largest_differences(first: Tensor, second: Tensor, count: int) -> list[int]:
    """The `count` places at which |second - first| is largest and not 0, largest first."""
    gaps = (second.double() - first.double()).abs()
    order = torch.argsort(gaps, descending=True, stable=True)[:count]
    return [int(place) for place in order if gaps[place] > 0]


@dataclass(frozen=True, slots=True)
class TokenGap:
    """A token on which two variants put different weight; `row` and `column` are of the batch."""

    row: int
    column: int
    first: float
    second: float


@dataclass(frozen=True, slots=True)
class PairResult:
    """`second` against `first`, over the tokens that may have loss.

    `advantage_rank` is Spearman's rho of the responses' mean advantages. `largest` are the tokens
    with the largest |difference| of weights.
    """

    first: str
    second: str
    weights: VectorDifference
    advantage_rank: float | None
    largest: tuple[TokenGap, ...]


LARGEST = 10
"""Tokens whose weights differ most that are shown of a pair."""


def compare_pair(first: VariantResult, second: VariantResult, mask: Tensor) -> PairResult:
    """All of it for two results on tokens `mask` [B, T]; responses without such a token are out."""
    tokens = mask.bool()
    places, rows = tokens.nonzero(), tokens.any(dim=1)
    a, b = first.weights[tokens], second.weights[tokens]
    ranks = [result.row_advantages(mask)[rows] for result in (first, second)]
    largest = [
        TokenGap(int(places[i, 0]), int(places[i, 1]), float(a[i]), float(b[i]))
        for i in largest_differences(a, b, LARGEST)
    ]
    return PairResult(
        first.label,
        second.label,
        vector_difference(a, b),
        rank_correlation(*ranks),
        tuple(largest),
    )


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
        prepared = step.prepare(variant.objective, rows, mini)
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
