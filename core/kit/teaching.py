"""What transforms of advantages and divergences from a teacher promise."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import RowLoss, TeacherRows, TextLoss
from posttrain.core.kit.batches import (
    NAN,
    expect_rows_apart,
    expect_same,
    ragged_batch,
    without_columns,
)
from posttrain.core.kit.checks import Skipped, Subject, check, expect
from posttrain.core.math.masking import masked
from posttrain.core.tracking.metric_names import check_names

# --- transforms of advantages -----------------------------------------------------------------


def transformed(subject: Subject, batch: RolloutBatch) -> Tensor:
    """New advantages [B, T] of the batch's own, as a stage takes them: 0 under the mask."""
    found = subject.build().transform(batch.column("advantages"), batch)
    check_names(found.metrics)
    return masked(found.advantages, batch.mask)


@check(
    "advantages stay [B, T], finite and detached, whatever is under the mask", "advantage_transform"
)
def _shape_and_mask(subject: Subject) -> None:
    dirty, clean = ragged_batch(NAN), ragged_batch(0.25)
    raw = subject.build().transform(dirty.column("advantages"), dirty).advantages
    expect(raw.shape == dirty.mask.shape, f"the shape is {list(raw.shape)}, not [B, T]")
    expect(not raw.requires_grad, "they carry a gradient")
    got = transformed(subject, dirty)
    expect(got.isfinite().all(), "some are not finite where masked positions hold NaN")
    expect_same(got, transformed(subject, clean), "what lies under the mask matters")
    if subject.build().carries_signal():
        moved = got - masked(clean.column("advantages"), clean.mask)
        expect(moved.abs().max() > 0, "it says carries_signal, and changes no advantage")


@check("permuting the rows permutes the advantages", "advantage_transform")
def _permutation(subject: Subject) -> None:
    expect_rows_apart(lambda batch: transformed(subject, batch))


@check("it reads no column that it does not declare", "advantage_transform")
def _declared(subject: Subject) -> None:
    batch = ragged_batch(0.0)
    bare = without_columns(batch, subject.build().required_columns() | {"advantages"})
    expect_same(transformed(subject, bare), transformed(subject, batch), "without other columns")


@check("a token that no teacher scored keeps its advantage", "advantage_transform")
def _unscored(subject: Subject) -> None:
    batch = ragged_batch(0.0)
    if "teacher_logprobs" not in subject.build().required_columns():
        raise Skipped("it does not read teacher_logprobs")
    nothing = batch.with_columns(
        teacher_logprobs=torch.full_like(batch.column("teacher_logprobs"), NAN)
    )
    wanted = masked(batch.column("advantages"), batch.mask)
    expect_same(transformed(subject, nothing), wanted, "with no teacher at all", atol=1e-9)


@check("one that gives a response one advantage says so rightly", "advantage_transform")
def _within_rows(subject: Subject) -> None:
    batch = ragged_batch(0.0)
    rows = torch.linspace(-1.5, 2.0, len(batch), dtype=torch.float64)[:, None]
    flat = batch.with_columns(advantages=rows.expand(batch.mask.shape).clone())
    got = transformed(subject, flat)
    spread = max(
        float(g[m].max() - g[m].min())
        for g, m in zip(got, flat.mask.bool(), strict=True)
        if m.any()
    )
    varies = subject.build().varies_in_a_row()
    expect(varies or spread < 1e-9, "tokens of a row differ, and it does not say varies_in_a_row")


# --- divergences from a teacher ---------------------------------------------------------------

SIZE, TOKENS = 7, 5


def _logits(seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    noise = torch.Generator().manual_seed(seed)
    return torch.randn(TOKENS, SIZE, generator=noise, dtype=torch.float64).to(dtype)


def rows_of(subject: Subject, logits: Tensor, teacher: Tensor, **groups: Tensor) -> RowLoss:
    """The losses of `logits` [N, V] against a teacher's, of whom it is given what it reads.

    `groups` are the fields of `TeacherRows` that only a loss of texts has.
    """
    loss = subject.build()
    logprobs = torch.log_softmax(teacher, dim=-1)
    sampled = torch.arange(len(logits)) % SIZE
    own = torch.log_softmax(logits.detach(), dim=-1)
    k = min(loss.num_candidates(), SIZE)
    best = logprobs.topk(k, dim=-1) if k else None
    found: RowLoss = loss.rows(
        logits,
        TeacherRows(
            sampled=sampled,
            logits=teacher if loss.reads() == "logits" else None,
            topk_ids=None if best is None else best.indices,
            topk_logprobs=None if best is None else best.values,
            old_logprobs=own.gather(1, sampled[:, None]).squeeze(1),
            logprobs=logprobs.gather(1, sampled[:, None]).squeeze(1),
            # Of a loss of texts: both have the same tokens.
            matched=torch.arange(SIZE)[:, None].expand(-1, 2),
            **groups,
        ),
    )
    return found


@check(
    "the loss is [N] and finite, with a gradient, in the dtype of the logits", "distillation_loss"
)
def _rows(subject: Subject) -> None:
    for dtype in (torch.float64, torch.float32):
        logits = _logits(0, dtype).requires_grad_()
        found = rows_of(subject, logits, _logits(1, dtype))
        expect(found.loss.shape == (TOKENS,), f"the shape is {list(found.loss.shape)}, not [N]")
        expect(
            found.scored.shape == (TOKENS,) and found.scored.dtype == torch.bool,
            "scored is not [N] of booleans",
        )
        expect(found.scored.all(), "it says of scored tokens that they are not")
        expect(found.loss.dtype == dtype, f"it is {found.loss.dtype} for {dtype}")
        (grad,) = torch.autograd.grad(found.loss.sum(), logits)
        expect(found.loss.isfinite().all() and grad.isfinite().all(), "it is not finite")
        expect(grad.abs().max() > 0, "no gradient reaches the policy")
        expect(grad.sum(dim=1).abs().max() < 1e-4, "a constant added to all logits changes it")


@check("at the teacher there is nothing to learn", "distillation_loss")
def _zero(subject: Subject) -> None:
    logits = _logits(0).requires_grad_()
    found = rows_of(subject, logits, _logits(0))
    (grad,) = torch.autograd.grad(found.loss.sum(), logits)
    expect(grad.abs().max() < 1e-9, f"the gradient is up to {float(grad.abs().max()):.3g}")


@check("a token's loss does not depend on the other tokens of the chunk", "distillation_loss")
def _chunks(subject: Subject) -> None:
    whole = rows_of(subject, _logits(0), _logits(1)).loss
    one = rows_of(subject, _logits(0)[:1], _logits(1)[:1]).loss
    expect_same(one, whole[:1], "one token alone", rtol=1e-9, atol=1e-9)


@check("its metrics are [N] and detached", "distillation_loss")
def _row_metrics(subject: Subject) -> None:
    found = rows_of(subject, _logits(0).requires_grad_(), _logits(1))
    for name, value in found.metrics.items():
        expect(value.shape == (TOKENS,), f"{name} has the shape {list(value.shape)}")
        expect(not value.requires_grad, f"{name} carries a gradient")
        expect(value.isfinite().all(), f"{name} is not finite")
    check_names(found.metrics)


@check("the gradient moves the policy towards the teacher", "distillation_loss")
def _descends(subject: Subject) -> None:
    logits, teacher = _logits(0), _logits(1)
    wanted = torch.log_softmax(teacher, dim=-1)

    def gap(z: Tensor) -> float:
        return float((wanted.exp() * (wanted - torch.log_softmax(z, dim=-1))).sum())

    leaf = logits.clone().requires_grad_()
    (grad,) = torch.autograd.grad(rows_of(subject, leaf, teacher).loss.sum(), leaf)
    expect(gap(logits - 0.01 * grad) < gap(logits), "a step along it leads away from the teacher")


@check("a group learns from all of its tokens", "distillation_loss")
def _groups(subject: Subject) -> None:
    if not isinstance(subject.build(), TextLoss):
        raise Skipped("it compares tokens, not stretches of text")
    others = torch.full((TOKENS,), 0.5, dtype=torch.float64, requires_grad=True)
    less = others.detach() / 2
    logits = _logits(0).requires_grad_()
    found = rows_of(subject, logits, _logits(0), others=others, teacher_others=less)
    to_others, to_logits = torch.autograd.grad(found.loss.sum(), (others, logits))
    expect((to_others > 0).all(), "likelier other tokens than the teacher's are not made rarer")
    expect(to_logits.isfinite().all(), "the gradient of the logits is not finite")
    alone = rows_of(subject, _logits(0), _logits(1)).loss
    wider = torch.cat([_logits(1), _logits(2)[:, :2]], dim=1)
    other = rows_of(subject, _logits(0), wider).loss
    expect(other.shape == (TOKENS,) and other.isfinite().all(), "a teacher of more tokens breaks")
    ones = torch.ones(TOKENS, dtype=torch.float64)
    same = rows_of(subject, _logits(0), _logits(1), others=ones, teacher_others=ones).loss
    expect_same(same, alone, "products of no tokens", rtol=1e-9, atol=1e-9)
