"""What losses on preferences promise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from posttrain.core.contracts import LabelledScores, LabelLoss, PairLoss, PairScores
from posttrain.core.kit.batches import expect_same, expect_slope
from posttrain.core.kit.checks import Subject, broken, check, expect, expect_equal
from posttrain.core.tracking.metric_names import check_names


def preference_losses(
    subject: Subject, better: Tensor, worse: Tensor, parts: list[Tensor], held: Tensor | None = None
) -> Tensor:
    """Losses of rows whose wanted answer scores `better` and whose other one scores `worse`.

    The rows are a mini-batch that is taken in `parts`; a loss of labelled rows has one of each
    label for a pair. `held` [2, N] are the scores that `prepare` sees, those of the rows if None.
    """
    loss = subject.build()
    num_pairs, kept = len(better), []
    column = torch.ones(num_pairs, dtype=better.dtype)
    seen = (better, worse) if held is None else (held[0], held[1])
    if isinstance(loss, PairLoss):
        mini, before = (_pairs(one, other, column) for one, other in ((better, worse), seen))
        prepared = loss.prepare(rows_of(before, torch.arange(num_pairs)))
        kept = [loss.pair_loss(rows_of(mini, p), prepared.rows(p)) for p in parts]
        return torch.cat(kept)
    if not isinstance(loss, LabelLoss):
        broken("it derives from neither PairLoss nor LabelLoss")
    labels = torch.arange(2 * num_pairs) < num_pairs
    scores = torch.cat([better, worse])
    before_scores = torch.cat(seen).detach()
    rows = LabelledScores(before_scores, labels, 0.1 * before_scores, num_rows=2.0 * num_pairs)
    ready = loss.prepare(rows)
    for part in (torch.cat([p, p + num_pairs]) for p in parts):
        kept.append(loss.label_loss(LabelledScores(scores[part], labels[part]), ready.rows(part)))
    return torch.cat(kept)


def _pairs(better: Tensor, worse: Tensor, ones: Tensor) -> PairScores:
    return PairScores(
        better,
        worse,
        0 * ones,
        better - 3,
        worse - 4,
        -3 * ones,
        -4 * ones,
        5 * ones,
        6 * ones,
        3 - better,
        num_pairs=float(len(ones)),
        num_chosen_tokens=5.0 * len(ones),
    )


def rows_of(mini: PairScores, index: Tensor) -> PairScores:
    """The rows of a mini-batch; its counts stay those of the whole."""
    # Any: tensors, and numbers that hold for all rows
    columns: dict[str, Any] = {}
    for field in fields(mini):
        value = getattr(mini, field.name)
        columns[field.name] = value[index] if isinstance(value, Tensor) else value
    return PairScores(**columns)


def _scores() -> Tensor:
    noise = torch.Generator().manual_seed(3)
    return torch.randn(2, 5, generator=noise, dtype=torch.float64)


@check("the loss is lower where the better answers score more", "preference_loss")
def _order(subject: Subject) -> None:
    far, everything = torch.full((2,), 20.0, dtype=torch.float64), [torch.arange(2)]
    wrong = preference_losses(subject, -far, far, everything)
    right = preference_losses(subject, far, -far, everything)
    expect(wrong.isfinite().all() and right.isfinite().all(), "it is not finite at scores of 20")
    good, bad = float(right.sum()), float(wrong.sum())
    expect(good < bad, f"in the right order it is {good}, in the wrong one {bad}")


@check("how the mini-batch is split changes neither value nor gradient", "preference_loss")
def _splitting(subject: Subject) -> None:
    scores = _scores().requires_grad_()
    found = []
    for size in (5, 2, 1):
        parts = list(torch.split(torch.arange(5), size))
        total = preference_losses(subject, scores[0], scores[1], parts).sum()
        (grad,) = torch.autograd.grad(total, scores)
        found.append((total.detach(), grad))
    for size, split in zip((2, 1), found[1:], strict=True):
        for got, wanted, what in zip(split, found[0], ("value", "gradient"), strict=True):
            expect_same(got, wanted, f"the {what} in parts of {size}", rtol=1e-7, atol=1e-7)
    grad = found[0][1]
    expect(grad.isfinite().all() and grad.abs().sum() > 0, "no gradient, or not a finite one")


@check("autograd's gradient is that of finite differences", "preference_loss")
def _finite_differences(subject: Subject) -> None:
    scores, everything = _scores(), [torch.arange(5)]
    direction = torch.linspace(-1, 1, 10, dtype=torch.float64).reshape(2, 5)
    leaf = scores.clone().requires_grad_()
    total = preference_losses(subject, leaf[0], leaf[1], everything, scores).sum()
    (grad,) = torch.autograd.grad(total, leaf)

    def total_of(held: Tensor | None) -> Callable[[float], float]:
        """The loss after a step; `held` is what `prepare` sees, None = the moved scores."""

        def value(step: float) -> float:
            moved = scores + step * direction
            return float(preference_losses(subject, moved[0], moved[1], everything, held).sum())

        return value

    # What a loss prepares is a constant to it (KTO's reference point), or follows the scores (AOT).
    expect_slope(grad, direction, total_of(scores), total_of(None))


@check("the loss is a number per row, in the dtype of the scores", "preference_loss")
def _shape_and_dtype(subject: Subject) -> None:
    scores, everything = _scores(), [torch.arange(5)]
    exact = preference_losses(subject, scores[0], scores[1], everything)
    single = preference_losses(subject, scores[0].float(), scores[1].float(), everything)
    rows = 5 if isinstance(subject.build(), PairLoss) else 10
    expect_equal(tuple(exact.shape), (rows,), "its shape")
    expect(single.dtype == torch.float32, f"it is {single.dtype} for float32")
    expect_same(single.double(), exact, "float32 against float64", rtol=1e-3, atol=1e-4)


@check("it says what it reads and what it trains", "preference_loss")
def _declared(subject: Subject) -> None:
    loss = subject.build()
    expect_equal(loss.data, "pairs" if isinstance(loss, PairLoss) else "labels", "`data`")
    expect(
        loss.trains and loss.trains <= {"policy", "reward_model"},
        f"`trains` is {set(loss.trains)}, expected some of policy and reward_model",
    )
    scale = loss.reward_scale()
    expect(scale is None or scale > 0, f"`reward_scale` is {scale}, expected None or above 0")
    if isinstance(loss, PairLoss) and "policy" in loss.trains:
        ones = torch.ones(2, dtype=torch.float64)
        scored = PairScores(ones, ones, ones, -ones, -ones, -ones, -ones, ones, ones, ones)
        check_names(loss.metrics(scored))
