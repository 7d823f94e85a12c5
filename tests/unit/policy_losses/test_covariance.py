"""Clip-Cov and KL-Cov: which tokens they pick, and what happens to those."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.kit.batches import build_batch
from posttrain.core.math.covariance import highest, token_covariances
from tests.helpers.losses import build_loss, policy_batch

WIDE: dict[str, object] = {"cov_low": -99.0, "cov_high": 99.0}


def batch_of(
    ratios: list[list[float]], advantages: list[list[float]]
) -> tuple[RolloutBatch, Tensor]:
    new = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    batch = build_batch(
        torch.ones(new.shape),
        old_logprobs=torch.zeros_like(new),
        logprobs_now=new,
        advantages=torch.tensor(advantages, dtype=torch.float64),
    )
    return batch, new


def picked(name: str, batch: RolloutBatch, fields: dict[str, object], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    (column,) = build_loss(name, fields).prepare(batch, generator).columns.values()
    return column


def test_covariances_are_of_deviations_from_the_means_over_the_mask() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    advantages = torch.tensor([[1.0, 2.0, math.nan], [6.0, 9.0, 9.0]], dtype=torch.float64)
    logprobs = torch.tensor([[-1.0, -2.0, 7.0], [-6.0, math.nan, 0.0]], dtype=torch.float64)
    got = token_covariances(advantages, logprobs, mask)
    assert got.tolist() == [[-2 * 2, -1 * 1, 0], [3 * -3, 0, 0]]


def test_clip_cov_takes_the_gradient_from_what_it_drops_and_nothing_else() -> None:
    batch, new = batch_of([[1.1, 0.9, 1.05, 0.95]], [[1.0, -1.0, 2.0, 0.5]])
    loss = build_loss("clip_cov", WIDE | {"cov_ratio": 0.5})
    prepared = loss.prepare(batch, torch.Generator().manual_seed(1))
    result = loss.token_loss(new, batch, prepared)
    (grad,) = torch.autograd.grad(result.loss.sum(), new)
    dropped = prepared.columns["cov_drop"]
    assert dropped.sum() == 2
    assert torch.equal(grad == 0, dropped) and torch.equal(result.loss == 0, dropped)
    assert torch.equal(result.metrics["cov/picked_frac"].bool(), dropped)


def test_clip_cov_does_not_pick_what_is_clipped_already_or_out_of_range() -> None:
    batch, _ = batch_of([[1.5, 0.5, 1.05, 0.95]], [[1.0, -1.0, 2.0, 0.5]])
    everything = WIDE | {"cov_ratio": 1.0}
    assert picked("clip_cov", batch, everything)[0].tolist() == [False, False, True, True]
    value = token_covariances(batch.column("advantages"), batch.column("logprobs_now"), batch.mask)
    third = float(value[0, 2])
    above = everything | {"cov_low": third + 1e-9}
    assert not picked("clip_cov", batch, above)[0, 2]
    assert not picked("clip_cov", batch, everything | {"cov_high": third})[0, 2]
    nothing = WIDE | {"cov_low": 90.0}
    assert not picked("clip_cov", batch, nothing).any()


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_how_many_are_picked(name: str) -> None:
    batch, _ = policy_batch(seed=2)
    num_tokens = int(batch.mask.sum())
    bounds = WIDE if name == "clip_cov" else {}
    clip = {"clip_low": 1.0, "clip_high": 9.0} if name == "clip_cov" else {}
    for share, min_k, wanted in (
        (2e-4, 1, 1),
        (2e-4, 0, 0),
        (0.25, 1, num_tokens // 4),
        (1, 0, 99),
    ):
        fields = bounds | clip | {"cov_ratio": share, "min_k": min_k}
        got = picked(name, batch, fields)
        assert got.sum() == min(wanted, num_tokens)
        assert not got[~batch.mask.bool()].any()


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_a_pick_follows_its_rows_and_depends_on_the_generator_alone(name: str) -> None:
    batch, _ = policy_batch(seed=2)
    fields: dict[str, object] = {"cov_ratio": 0.25} | (WIDE if name == "clip_cov" else {})
    order = torch.tensor([5, 2, 7, 0, 4, 1, 6, 3])
    first = picked(name, batch, fields, seed=3)
    assert torch.equal(picked(name, batch.select(order), fields, seed=3), first[order])
    others = [picked(name, batch, fields, seed=s) for s in range(5)]
    assert any(not torch.equal(first, other) for other in others) == (name == "clip_cov")


def test_kl_cov_penalises_the_tokens_of_highest_signed_covariance() -> None:
    # Covariances: both deviations negative at the first, both positive at the last.
    batch, new = batch_of([[0.5, 1.3, 0.8, 2.0]], [[-2.0, -1.0, 1.0, 2.0]])
    loss = build_loss("kl_cov", {"cov_ratio": 0.5, "kl_coef": 0.3})
    prepared = loss.prepare(batch, torch.Generator())
    assert prepared.columns["cov_penalised"][0].tolist() == [True, False, False, True]
    result = loss.token_loss(new, batch, prepared)
    (grad,) = torch.autograd.grad(result.loss.sum(), new)
    gap = math.log(2)
    assert result.loss[0].tolist() == pytest.approx([1 + 0.3 * gap, 1.3, -0.8, -4 + 0.3 * gap])
    assert grad[0].tolist() == pytest.approx([1 - 0.3, 1.3, -0.8, -4 + 0.3])
    assert result.metrics["kl/old_abs"][0, 0].item() == pytest.approx(gap)


def test_kl_cov_has_no_penalty_gradient_on_the_first_update() -> None:
    batch, new = batch_of([[1.0, 1.0]], [[1.0, -1.0]])
    loss = build_loss("kl_cov", {"cov_ratio": 1.0})
    result = loss.token_loss(new, batch, loss.prepare(batch, torch.Generator()))
    (grad,) = torch.autograd.grad(result.loss.sum(), new)
    assert grad[0].tolist() == [-1.0, 1.0]


def test_ties_go_to_the_smaller_row_id_and_then_to_the_earlier_token() -> None:
    values, mask = torch.zeros(3, 2), torch.ones(3, 2)
    row_ids = torch.tensor([7, 1, 4])
    got = highest(values, mask, 3, row_ids)
    assert got.tolist() == [[False, False], [True, True], [True, False]]
