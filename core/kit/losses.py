"""What policy losses and aggregators promise."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import TokenLoss
from posttrain.core.kit.batches import (
    LENGTHS,
    NAN,
    expect_same,
    expect_slope,
    policy_batch,
    ragged_batch,
)
from posttrain.core.kit.checks import Skipped, Subject, check, expect, expect_equal
from posttrain.core.tracking.metric_names import check_names

# --- aggregators ------------------------------------------------------------------------------


@check("micro-batches and their padding change neither value nor gradient", "aggregator")
def _splitting(subject: Subject) -> None:
    rng = random.Random(0)
    for seed in range(40):
        lengths = [rng.randint(0, 6) for _ in range(rng.randint(1, 8))]
        rows = rng.sample(range(len(lengths)), len(lengths))
        cuts = sorted({rng.randint(1, len(lengths)) for _ in range(rng.randint(0, 4))})
        cuts = sorted({*cuts, len(lengths)})
        parts = [rows[a:b] for a, b in zip([0, *cuts], cuts, strict=False)]
        _compare_split(subject, lengths, parts, seed)


def _compare_split(subject: Subject, lengths: list[int], parts: list[list[int]], seed: int) -> None:
    aggregator = subject.build()
    noise = torch.Generator().manual_seed(seed)
    mask = (torch.arange(7)[None, :] < torch.tensor(lengths)[:, None]).double()
    inputs = torch.randn(mask.shape, generator=noise, dtype=torch.float64)
    weights = torch.randn(7, generator=noise, dtype=torch.float64)
    group_id = torch.randint(3, (len(lengths),), generator=noise)
    counts = aggregator.count(mask, group_id)

    def run(row_sets: list[list[int]], *, trimmed: bool) -> tuple[Tensor, Tensor]:
        parameters = weights.clone().requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        for rows in row_sets:
            # Micro-batches are padded to their own longest row.
            width = max(1, max(lengths[row] for row in rows)) if trimmed else 7
            loss = torch.sin(inputs[rows] * parameters)[:, :width]
            part = mask[rows][:, :width]
            mine = counts.rows(torch.tensor(rows))
            share = aggregator.aggregate(TokenLoss(loss, part), part, mine, group_id[rows])
            share.backward()
            total = total + share.detach()
        assert parameters.grad is not None
        return total, parameters.grad

    whole, split = run([list(range(len(lengths)))], trimmed=False), run(parts, trimmed=True)
    case = f"rows of {lengths} tokens in micro-batches {parts}"
    for found, wanted, what in zip(split, whole, ("value", "gradient"), strict=True):
        expect_same(found, wanted, f"the {what} of {case}", rtol=1e-9, atol=1e-12)


@check("what lies under the mask has no part in the loss", "aggregator")
def _aggregated_mask(subject: Subject) -> None:
    aggregator, batch = subject.build(), ragged_batch(NAN)
    loss = batch.column("advantages").clone().requires_grad_()
    counts = aggregator.count(batch.mask, batch.group_id)
    total = aggregator.aggregate(TokenLoss(loss, batch.mask), batch.mask, counts)
    (grad,) = torch.autograd.grad(total, loss)
    expect(total.dim() == 0 and total.isfinite(), f"the loss is {total}, not a finite number")
    expect(torch.equal(grad != 0, batch.mask.bool()), "not exactly the tokens of the mask count")


@check("an empty mini-batch has the loss 0", "aggregator")
def _empty(subject: Subject) -> None:
    aggregator, batch = subject.build(), ragged_batch(0.0)
    mask = torch.zeros_like(batch.mask)
    counts = aggregator.count(mask, batch.group_id)
    total = aggregator.aggregate(TokenLoss(torch.ones_like(mask), mask), mask, counts)
    expect(total == 0, f"it is {float(total)}")


@check("a boolean mask weighs as a float mask does", "aggregator")
def _boolean_mask(subject: Subject) -> None:
    batch, aggregator = ragged_batch(0.0), subject.build()
    counts = aggregator.count(batch.mask, batch.group_id)
    weights = aggregator.weights(batch.mask.bool(), counts)
    wanted = aggregator.weights(batch.mask, counts)
    expect_same(weights.to(wanted.dtype), wanted, "weights", rtol=1e-6, atol=1e-8)


# --- policy losses ----------------------------------------------------------------------------


def loss_and_grad(
    subject: Subject, batch: RolloutBatch, new: Tensor, rows: Tensor | None = None
) -> tuple[TokenLoss, Tensor]:
    """Token losses and gradients on `rows` of a mini-batch, all when None."""
    loss = subject.build()
    draw = torch.Generator().manual_seed(3)
    prepared = loss.prepare(batch, draw) if loss.needs_prepare() else None
    if rows is not None:
        batch, new = batch.select(rows), new[rows]
        prepared = prepared and prepared.rows(rows)
    new = new.clone().requires_grad_()
    result: TokenLoss = loss.token_loss(new, batch, prepared)
    (grad,) = torch.autograd.grad(_total(result), new)
    return result, grad


def _total(result: TokenLoss) -> Tensor:
    return torch.where(result.mask.bool(), result.loss, torch.zeros_like(result.loss)).sum()


@check("the loss is [B, T]; masked tokens get exactly no gradient, NaN or not", "policy_loss")
def _masked_tokens(subject: Subject) -> None:
    clean, grad = loss_and_grad(subject, *policy_batch(0.25))
    dirty, dirty_grad = loss_and_grad(subject, *policy_batch(NAN))
    taken = dirty.mask.bool()
    shapes = {tuple(clean.loss.shape), tuple(clean.mask.shape), tuple(grad.shape)}
    expect(len(shapes) == 1, f"loss, mask and gradient have the shapes {sorted(shapes)}")
    beyond = taken & ~ragged_batch(0.0).mask.bool()
    expect(not beyond.any(), "its mask has tokens that the batch leaves out")
    expect_same(dirty_grad, grad, "the gradient with NaN under the mask")
    expect(not dirty_grad[~taken].any(), "tokens under the mask get a gradient")
    expect_same(dirty.loss[taken], clean.loss[taken], "the loss with NaN under the mask")
    expect(grad[taken].isfinite().all(), "the gradient is not finite")
    expect(grad[taken].abs().max() > 0, "no token gets a gradient")


@check("autograd's gradient is that of finite differences", "policy_loss")
def _finite_differences(subject: Subject) -> None:
    if subject.cls.stops_gradients:
        raise Skipped("it says stops_gradients: a factor of its value is held constant")
    batch, new = policy_batch(0.25)
    loss = subject.build()
    draw = torch.Generator().manual_seed(3)
    prepared = loss.prepare(batch, draw) if loss.needs_prepare() else None
    _, grad = loss_and_grad(subject, batch, new)
    direction = torch.randn(new.shape, generator=torch.Generator().manual_seed(5)).double()

    def value(step: float) -> float:
        return float(_total(loss.token_loss(new + step * direction, batch, prepared)))

    hint = "; a loss that holds a factor constant on purpose says stops_gradients = True"
    expect_slope(grad, direction, value, tolerance=1e-4, hint=hint)


@check("the loss has the dtype of the log-probs, to its precision", "policy_loss")
def _dtype(subject: Subject) -> None:
    batch, new = policy_batch(0.25)
    single = {
        name: batch.column(name).float()
        for name in ("advantages", "old_logprobs", "ref_logprobs", "logprobs_now", "is_weight")
    }
    got, grad = loss_and_grad(subject, batch.with_columns(**single), new.float())
    wanted, exact = loss_and_grad(subject, batch, new)
    expect(grad.dtype == torch.float32, f"the gradient is {grad.dtype} for float32")
    kept = got.mask.bool()
    expect_same(got.loss[kept].double(), wanted.loss[kept], "float32", rtol=1e-3, atol=1e-4)
    expect_same(grad.double(), exact, "the gradient in float32", rtol=1e-3, atol=1e-4)


@check("a token's loss does not depend on the other rows of the micro-batch", "policy_loss")
def _other_rows(subject: Subject) -> None:
    batch, new = policy_batch(0.25)
    whole, grad = loss_and_grad(subject, batch, new)
    for row in range(len(LENGTHS)):
        rows = torch.tensor([row])
        alone, alone_grad = loss_and_grad(subject, batch, new, rows)
        kept = alone.mask.bool()
        close = {"rtol": 1e-7, "atol": 1e-7}
        expect_same(alone.loss[kept], whole.loss[rows][kept], f"row {row} alone", **close)
        expect_same(alone_grad, grad[rows], f"the gradient of row {row} alone", **close)


@check("rows that it calls idle have no gradient and no part in others'", "policy_loss")
def _idle_rows(subject: Subject) -> None:
    if not subject.cls.idle_at_zero:
        raise Skipped("it does not say idle_at_zero")
    batch, new = policy_batch(0.25)
    _, whole = loss_and_grad(subject, batch, new)
    for row in range(len(LENGTHS)):
        moved = batch.column("advantages").clone()
        moved[row] = 0.0
        _, grad = loss_and_grad(subject, batch.with_columns(advantages=moved), new)
        others = torch.arange(len(LENGTHS)) != row
        expect(not grad[row].any(), f"row {row} of advantage 0 has a gradient")
        expect_same(grad[others], whole[others], f"the other rows without row {row}")
    expect(not subject.build().needs_prepare(), "it prepares whole mini-batches, idle rows as well")


@check("it reads no column that it does not declare", "policy_loss")
def _declared(subject: Subject) -> None:
    batch, new = policy_batch(0.25)
    declared = subject.build().required_columns() | {"mask", "logprobs_now"}
    optional = {"old_logprobs", "ref_logprobs", "entropy", "values", "advantages", "acc", "rewards"}
    absent: dict[str, Any] = dict.fromkeys(optional - declared)  # Any: columns of any axes
    bare = replace(batch, **absent)
    got, wanted = loss_and_grad(subject, bare, new), loss_and_grad(subject, batch, new)
    expect_same(got[0].loss, wanted[0].loss, "the loss without other columns")
    expect_same(got[1], wanted[1], "the gradient without other columns")


@check("what it prepares fits the rows", "policy_loss")
def _prepared(subject: Subject) -> None:
    batch, _ = policy_batch(NAN)
    prepared = subject.build().prepare(batch, torch.Generator())
    for name, column in prepared.columns.items():
        expect_equal(len(column), len(batch), f"the rows of the prepared column {name}")
        expect(not column.requires_grad, f"the prepared column {name} carries a gradient")
    numbers = {**prepared.scalars, **prepared.metrics}
    wrong = sorted(name for name, value in numbers.items() if not isfinite(value))
    expect(not wrong, f"of what it prepares, {wrong} are not finite")
    check_names(prepared.metrics)


@check("its metrics are [B, T] or [B], detached and finite", "policy_loss")
def _metrics(subject: Subject) -> None:
    result, _ = loss_and_grad(subject, *policy_batch(NAN))
    for name, value in result.metrics.items():
        kept = result.mask.bool() if value.dim() == 2 else result.mask.bool().any(dim=1)
        expect(value.shape == kept.shape, f"{name} has the shape {list(value.shape)}")
        expect(not value.requires_grad, f"{name} carries a gradient")
        expect(value[kept].isfinite().all(), f"{name} is not finite")
    check_names(set(result.metrics) - {"ratio"})  # the learner turns it into ratio/*


@check("it continues from its state", "policy_loss")
def _state(subject: Subject) -> None:
    first, second = subject.build(), subject.build()
    first.on_phase_end({"kl/phase_k3": 5.0})
    second.load_state(json.loads(json.dumps(first.state())))
    expect_equal(second.state(), first.state(), "the state that was loaded")
    batch, new = policy_batch(0.25)
    losses = []
    for loss in (first, second):
        draw = torch.Generator().manual_seed(3)
        prepared = loss.prepare(batch, draw) if loss.needs_prepare() else None
        losses.append(loss.token_loss(new, batch, prepared).loss)
    expect_same(losses[1], losses[0], "the loss after a resume")
