"""What every advantage, aggregator, loss and KL plugin promises, whoever wrote it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import (
    AdvantageEstimator,
    Aggregator,
    Counts,
    KlController,
    KlEstimator,
    PolicyLoss,
    PreferenceLoss,
    TokenLoss,
)
from posttrain.core.plugin_manager import PluginEntry
from tests.helpers.batches import build_batch
from tests.helpers.plugins import build, of_kind

NAN = float("nan")

# --- batches for the maths --------------------------------------------------------------------

LENGTHS = (4, 1, 0, 3, 5, 2, 0, 5)
GROUPS = (0, 0, 0, 1, 1, 2, 3, 3)


def masked_positions(width: int = 5) -> Tensor:
    return torch.arange(width)[None, :] < torch.tensor(LENGTHS)[:, None]


def ragged_batch(under_the_mask: float, seed: int = 0) -> RolloutBatch:
    """Rows of 0 to 5 tokens in groups of 1 to 3, one row unscored, with every column filled.

    `under_the_mask` stands at every masked position of every per-token column.
    """
    noise = torch.Generator().manual_seed(seed)
    mask = masked_positions()
    row = torch.arange(len(LENGTHS))

    def column(scale: float) -> Tensor:
        values = scale * torch.randn(mask.shape, generator=noise, dtype=torch.float64)
        return torch.where(mask, values, torch.full_like(values, under_the_mask))

    scored = row != 4
    return build_batch(
        (mask & scored[:, None]).double(),
        response_mask=mask.double(),
        group_id=GROUPS,
        scored=scored.tolist(),
        token_rewards=column(1.0),
        old_logprobs=column(0.5) - 1,
        ref_logprobs=column(0.5) - 1,
        entropy=column(0.1),
        values=column(1.0),
        advantages=column(1.0),
        rewards=torch.randn(len(LENGTHS), generator=noise, dtype=torch.float64),
        acc=(row % 2).double(),
    )


# --- advantages -------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", of_kind("advantage"))
def test_advantages_are_finite_shaped_and_exactly_zero_under_the_mask(entry: PluginEntry) -> None:
    estimator: AdvantageEstimator[Any] = build(entry)
    clean, dirty = ragged_batch(0.25), ragged_batch(NAN)
    got = estimator.estimate(dirty).advantages
    assert got.shape == dirty.mask.shape and not got.requires_grad
    assert got.isfinite().all() and got.abs().max() > 0
    assert torch.equal(got[~dirty.mask.bool()], torch.zeros_like(got[~dirty.mask.bool()]))
    torch.testing.assert_close(got, estimator.estimate(clean).advantages, rtol=0, atol=0)


@pytest.mark.parametrize("entry", of_kind("advantage"))
def test_permuting_the_rows_permutes_the_advantages(entry: PluginEntry) -> None:
    estimator: AdvantageEstimator[Any] = build(entry)
    batch = ragged_batch(0.0)
    order = torch.tensor([5, 2, 7, 0, 4, 1, 6, 3])
    permuted = estimator.estimate(batch.select(order)).advantages
    torch.testing.assert_close(permuted, estimator.estimate(batch).advantages[order])


@pytest.mark.parametrize("entry", of_kind("advantage"))
def test_advantages_are_the_same_each_time(entry: PluginEntry) -> None:
    first, second = (build(entry).estimate(ragged_batch(0.0)).advantages for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("entry", of_kind("advantage"))
def test_advantages_need_no_column_that_is_not_declared(entry: PluginEntry) -> None:
    batch, always = ragged_batch(0.0), {"scored", "token_rewards"}
    optional = {"old_logprobs", "ref_logprobs", "entropy", "values", "advantages", "rewards", "acc"}
    absent = optional - set(entry.cls.needs) - always  # type: ignore[attr-defined]
    bare = replace(batch, **{name: None for name in absent})
    assert torch.equal(
        build(entry).estimate(bare).advantages, build(entry).estimate(batch).advantages
    )


# --- aggregators ------------------------------------------------------------------------------


@st.composite
def split_problems(draw: st.DrawFn) -> tuple[list[int], list[list[int]], int]:
    """Row lengths (0 allowed), the rows of each micro-batch, and a seed for the numbers."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=8))
    rows = draw(st.permutations(range(len(lengths))))
    cuts = sorted(draw(st.sets(st.integers(1, len(lengths)), max_size=4)) | {len(lengths)})
    parts = [list(rows[a:b]) for a, b in zip([0, *cuts], cuts, strict=False)]
    return lengths, parts, draw(st.integers(0, 2**16))


@pytest.mark.parametrize("entry", of_kind("aggregator"))
@given(problem=split_problems())
def test_splitting_into_micro_batches_changes_neither_value_nor_gradient(
    entry: PluginEntry, problem: tuple[list[int], list[list[int]], int]
) -> None:
    lengths, parts, seed = problem
    aggregator: Aggregator[Any] = build(entry)
    noise = torch.Generator().manual_seed(seed)
    mask = (torch.arange(7)[None, :] < torch.tensor(lengths)[:, None]).double()
    inputs = torch.randn(mask.shape, generator=noise, dtype=torch.float64)
    weights = torch.randn(7, generator=noise, dtype=torch.float64)
    counts = Counts(float(mask.sum()), float((mask.sum(1) > 0).sum()))

    def run(row_sets: list[list[int]], *, trimmed: bool) -> tuple[Tensor, Tensor]:
        parameters = weights.clone().requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        for rows in row_sets:
            # Micro-batches are padded to their own longest row.
            width = max(1, max(lengths[row] for row in rows)) if trimmed else 7
            loss = torch.sin(inputs[rows] * parameters)[:, :width]
            part = mask[rows][:, :width]
            share = aggregator.aggregate(TokenLoss(loss, part), part, counts)
            share.backward()
            total = total + share.detach()
        assert parameters.grad is not None
        return total, parameters.grad

    whole = run([list(range(len(lengths)))], trimmed=False)
    split = run(parts, trimmed=True)
    torch.testing.assert_close(split, whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("entry", of_kind("aggregator"))
def test_the_loss_under_the_mask_does_not_matter(entry: PluginEntry) -> None:
    aggregator: Aggregator[Any] = build(entry)
    batch = ragged_batch(NAN)
    loss = batch.column("advantages").clone().requires_grad_()
    counts = Counts(float(batch.mask.sum()), float((batch.mask.sum(1) > 0).sum()))
    total = aggregator.aggregate(TokenLoss(loss, batch.mask), batch.mask, counts)
    (grad,) = torch.autograd.grad(total, loss)
    assert total.isfinite()
    assert torch.equal(grad != 0, batch.mask.bool())


@pytest.mark.parametrize("entry", of_kind("aggregator"))
def test_a_boolean_mask_weighs_as_a_float_mask_does(entry: PluginEntry) -> None:
    mask = ragged_batch(0.0).mask
    counts = Counts(float(mask.sum()), float((mask.sum(1) > 0).sum()))
    aggregator: Aggregator[Any] = build(entry)
    torch.testing.assert_close(
        aggregator.weights(mask.bool(), counts), aggregator.weights(mask, counts)
    )


# --- policy losses ----------------------------------------------------------------------------


def loss_and_grad(entry: PluginEntry, batch: RolloutBatch, fill: float) -> tuple[TokenLoss, Tensor]:
    noise = torch.Generator().manual_seed(9)
    new = 0.5 * torch.randn(batch.mask.shape, generator=noise, dtype=torch.float64) - 1
    new = torch.where(masked_positions(), new, torch.full_like(new, fill)).requires_grad_()
    loss: PolicyLoss[Any] = build(entry)
    result = loss.token_loss(new, batch)
    total = torch.where(result.mask.bool(), result.loss, torch.zeros_like(result.loss)).sum()
    (grad,) = torch.autograd.grad(total, new)
    return result, grad


@pytest.mark.parametrize("entry", of_kind("policy_loss"))
def test_masked_tokens_get_exactly_no_gradient_even_when_they_are_nan(entry: PluginEntry) -> None:
    clean, grad = loss_and_grad(entry, ragged_batch(0.25), 0.1)
    dirty, dirty_grad = loss_and_grad(entry, ragged_batch(NAN), NAN)
    taken = dirty.mask.bool()
    assert clean.loss.shape == clean.mask.shape == grad.shape
    assert not (taken & ~ragged_batch(0.0).mask.bool()).any(), "takes tokens the batch leaves out"
    assert torch.equal(dirty_grad, grad)
    assert torch.equal(dirty_grad[~taken], torch.zeros_like(dirty_grad[~taken]))
    assert torch.equal(dirty.loss[taken], clean.loss[taken]) and grad[taken].abs().max() > 0


@pytest.mark.parametrize("entry", of_kind("policy_loss"))
def test_a_token_loss_does_not_depend_on_the_other_rows_of_the_micro_batch(
    entry: PluginEntry,
) -> None:
    batch = ragged_batch(0.25)
    whole, _ = loss_and_grad(entry, batch, 0.1)
    noise = torch.Generator().manual_seed(9)
    new = 0.5 * torch.randn(batch.mask.shape, generator=noise, dtype=torch.float64) - 1
    for row in range(len(LENGTHS)):
        rows = torch.tensor([row])
        alone = build(entry).token_loss(new[rows], batch.select(rows))
        kept = alone.mask.bool()
        torch.testing.assert_close(alone.loss[kept], whole.loss[rows][kept])


@pytest.mark.parametrize("entry", of_kind("policy_loss"))
def test_metrics_are_per_token_and_without_gradient(entry: PluginEntry) -> None:
    result, _ = loss_and_grad(entry, ragged_batch(0.25), 0.1)
    for value in result.metrics.values():
        assert value.shape == result.mask.shape and not value.requires_grad


# --- KL and preferences -----------------------------------------------------------------------


@pytest.mark.parametrize("entry", of_kind("kl"))
def test_kl_is_zero_at_the_reference_and_leaves_the_reference_alone(entry: PluginEntry) -> None:
    estimator: KlEstimator[Any] = build(entry)
    ref = torch.full((2, 3), -1.5, dtype=torch.float64)
    assert torch.equal(estimator.kl(ref, ref), torch.zeros_like(ref))
    new = (ref + 0.3).requires_grad_()
    kl = estimator.kl(new, ref)
    assert kl.shape == ref.shape and kl.requires_grad


@pytest.mark.parametrize("entry", of_kind("kl_controller"))
def test_a_controller_continues_from_its_state(entry: PluginEntry) -> None:
    first: KlController[Any] = build(entry)
    first.update(kl_per_token=0.5, kl_per_sequence=5.0, num_rows=16)
    second: KlController[Any] = build(entry)
    second.load_state(json.loads(json.dumps(first.state())))
    assert second.coefficient() == first.coefficient() >= 0


@pytest.mark.parametrize("entry", of_kind("preference_loss"))
def test_a_preference_loss_falls_as_the_chosen_answer_gains(entry: PluginEntry) -> None:
    loss: PreferenceLoss[Any] = build(entry)
    chosen = torch.tensor([-2.0, 0.0, 3.0], dtype=torch.float64, requires_grad=True)
    rejected = torch.zeros(3, dtype=torch.float64)
    value = loss.pair_loss(chosen, rejected, torch.zeros(3, dtype=torch.float64))
    (grad,) = torch.autograd.grad(value.sum(), chosen)
    assert value.shape == (3,) and (value[:-1] > value[1:]).all() and grad[0].item() < 0
