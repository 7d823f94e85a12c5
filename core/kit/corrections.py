"""What KL estimators, controllers of coefficients and rollout corrections promise."""

from __future__ import annotations

import json
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import Correction, KlEstimator
from posttrain.core.kit.batches import NAN, expect_same, expect_slope, ragged_batch
from posttrain.core.kit.checks import Skipped, Subject, check, expect, expect_equal
from posttrain.core.tracking.metric_names import check_names


def kl_of(estimator: KlEstimator[Any], new: Tensor, ref: Tensor) -> Tensor:
    """KL [B, T], from logits [B, T, 2] of an exact estimator, else from their first as log-prob."""
    if estimator.from_logits:
        rows = estimator.kl_of_logits(new.flatten(0, 1), ref.flatten(0, 1))
        return rows.reshape(new.shape[:2])
    logprobs, ref_logprobs = (x.log_softmax(-1)[..., 0] for x in (new, ref))
    on_policy = (logprobs - logprobs.detach()).exp()
    return estimator.kl(
        logprobs, ref_logprobs, None if estimator.ratio_source() is None else on_policy
    )


def _logits() -> Tensor:
    return torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(2, 3, 2)


@check("KL is [B, T] and exactly 0 at the reference", "kl")
def _zero_at_reference(subject: Subject) -> None:
    kl = kl_of(subject.build(), _logits().requires_grad_(), _logits())
    expect_same(kl.detach(), torch.zeros(2, 3, dtype=torch.float64), "KL of a policy with itself")


@check("KL and its gradient are finite, in the dtype of the log-probs", "kl")
def _finite(subject: Subject) -> None:
    for dtype in (torch.float64, torch.float32):
        new = (_logits() * 1.5).to(dtype).requires_grad_()
        kl = kl_of(subject.build(), new, _logits().to(dtype))
        expect(kl.shape == (2, 3), f"the shape is {list(kl.shape)}, not [B, T]")
        expect(kl.dtype == dtype, f"it is {kl.dtype} for {dtype}")
        expect(kl.isfinite().all(), "it is not finite")
        (grad,) = torch.autograd.grad(kl.sum(), new)
        expect(grad.isfinite().all(), "its gradient is not finite")
        expect(grad.abs().max() > 0, "no gradient reaches the policy")


@check("autograd's gradient is that of finite differences", "kl")
def _finite_differences(subject: Subject) -> None:
    estimator = subject.build()
    if estimator.stops_gradients or estimator.ratio_source() is not None:
        raise Skipped("its gradient is not that of its value, by what it declares")
    new, direction = _logits() * 1.5, torch.linspace(1, -2, 12).double().reshape(2, 3, 2)
    leaf = new.clone().requires_grad_()
    (grad,) = torch.autograd.grad(kl_of(estimator, leaf, _logits()).sum(), leaf)

    def value(step: float) -> float:
        return float(kl_of(estimator, new + step * direction, _logits()).sum())

    hint = "; an estimator whose gradient is another's on purpose says stops_gradients = True"
    expect_slope(grad, direction, value, hint=hint)


@check("a controller continues from its state", "kl_controller")
def _controller_state(subject: Subject) -> None:
    first, second = subject.build(), subject.build()
    expect(first.coefficient() >= 0, f"the coefficient is {first.coefficient()}, below 0")
    for kl in (0.5, 0.0, 1e3):
        first.update(kl_per_token=kl, kl_per_sequence=10 * kl, num_rows=16)
        value = first.coefficient()
        expect(isfinite(value) and value >= 0, f"after a KL of {kl} it is {value}")
    second.load_state(json.loads(json.dumps(first.state())))
    expect_equal(second.coefficient(), first.coefficient(), "the coefficient after a resume")


@check("a controller continues from its state", "entropy_controller")
def _entropy_controller_state(subject: Subject) -> None:
    first, second = subject.build(), subject.build()
    for entropy in (2.0, 0.0, 0.1, 1e3, 0.01):
        value = first.coefficient()
        expect(isfinite(value) and value >= 0, f"before an entropy of {entropy} it is {value}")
        first.update(entropy)
        second.load_state(json.loads(json.dumps(first.state())))
        expect_equal(second.coefficient(), first.coefficient(), "the coefficient after a resume")


# --- rollout corrections ----------------------------------------------------------------------


def correction_of(
    subject: Subject, under_the_mask: float, *, engine_error: float
) -> tuple[Correction, RolloutBatch]:
    """The correction of a batch whose engine is off by noise of that scale, and the batch."""
    batch = ragged_batch(under_the_mask)
    noise = torch.Generator().manual_seed(5)
    error = engine_error * torch.randn(batch.mask.shape, generator=noise, dtype=torch.float64)
    trainer = batch.column("old_logprobs").clone().requires_grad_()
    return subject.build().correct(trainer, trainer.detach() + error, batch.mask), batch


@check("an engine without error is not corrected, not by a bit", "rollout_correction")
def _no_op(subject: Subject) -> None:
    found, batch = correction_of(subject, 0.25, engine_error=0.0)
    for what in ("weight", "keep"):
        part = getattr(found, what)
        if part is not None:
            expect_same(part, batch.mask, f"`{what}` where log-probs are equal")


@check("weight and keep are [B, T], detached and 0 under the mask", "rollout_correction")
def _weights(subject: Subject) -> None:
    clean, batch = correction_of(subject, 0.25, engine_error=0.7)
    dirty, _ = correction_of(subject, NAN, engine_error=0.7)
    check_names(clean.metrics)
    expect_equal(dirty.metrics, clean.metrics, "metrics with NaN under the mask")
    for what in ("weight", "keep"):
        got, again = getattr(clean, what), getattr(dirty, what)
        expect((got is None) == (again is None), f"`{what}` depends on what lies under the mask")
        if got is not None:
            expect(got.shape == batch.mask.shape, f"`{what}` has the shape {list(got.shape)}")
            expect(not got.requires_grad, f"`{what}` carries a gradient")
            expect_same(again, got, f"`{what}` with NaN under the mask")
            expect((got >= 0).all(), f"`{what}` is below 0 somewhere")
            expect(not got[~batch.mask.bool()].any(), f"`{what}` is not 0 under the mask")


@check("an engine that gives no log-probs is not corrected", "rollout_correction")
def _silent_engine(subject: Subject) -> None:
    batch = ragged_batch(NAN)
    silent = torch.full_like(batch.mask, NAN)
    found = subject.build().correct(batch.column("old_logprobs"), silent, batch.mask)
    for what in ("weight", "keep"):
        part = getattr(found, what)
        if part is not None:
            expect_same(part, batch.mask, f"`{what}` without the engine's log-probs")
    wrong = sorted(name for name, value in found.metrics.items() if not isfinite(value))
    expect(not wrong, f"the metrics {wrong} are not finite")


@check("of a mini-batch it keeps a part, and all where nothing moved", "rollout_correction")
def _of_mini(subject: Subject) -> None:
    if not subject.cls.reads_mini:
        raise Skipped("it does not say reads_mini")
    batch = ragged_batch(NAN)
    old = batch.column("old_logprobs")
    moved = batch.with_columns(rollout_logprobs=old, logprobs_now=old + batch.column("advantages"))
    still = moved.with_columns(logprobs_now=old)
    for mini in (moved, still):
        found = subject.build().correct_mini(mini)
        check_names(found.metrics)
        expect(found.keep is not None, "it says reads_mini and keeps nothing of a mini-batch")
        expect(found.keep.shape == mini.mask.shape, f"the shape is {list(found.keep.shape)}")
        expect(set(found.keep.unique().tolist()) <= {0, 1}, "it holds more than 0 and 1")
        expect((found.keep <= mini.mask).all(), "it keeps tokens that the batch leaves out")
    expect_same(found.keep, batch.mask, "what it keeps where log-probs are equal")


@check("what is kept under the current policy is some of the mask", "rollout_correction")
def _kept(subject: Subject) -> None:
    batch = ragged_batch(NAN)
    # An engine whose every log-prob is higher: the policy has moved away from all it sampled.
    batch = batch.with_columns(rollout_logprobs=batch.column("old_logprobs") + 1)
    keep = subject.build().keeps(batch.column("old_logprobs"), batch)
    if keep is None:
        raise Skipped("it keeps no tokens by the current policy")
    expect(keep.shape == batch.mask.shape, f"the shape is {list(keep.shape)}, not [B, T]")
    expect(not keep.requires_grad, "it carries a gradient")
    expect(set(keep.unique().tolist()) <= {0, 1}, "it holds more than 0 and 1")
    expect((keep <= batch.mask).all(), "it keeps tokens that the batch leaves out")
    expect(keep.any() and not torch.equal(keep, batch.mask), "it keeps all tokens, or none")
