"""Weights of the future (`fipo`), and groups as classifications (`real`)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.kit.batches import build_batch
from tests.helpers.losses import (
    build_loss,
    objective_of,
    policy_batch,
    token_loss,
    total_and_grad,
)


def weights(ratios: list[float], sign: float = 1.0, **fields: object) -> list[float]:
    result, _ = token_loss("fipo", [ratios], [[sign] * len(ratios)], **fields)
    found: list[float] = result.metrics["fipo/weight"][0].tolist()
    return found


def test_the_weight_is_of_the_tokens_to_come() -> None:
    """Ratios 2 and 0.5 with a half-life of one token: F = (0.346574, -0.693147)."""
    wide = {"half_life": 1, "weight_range": 0, "high_only": False}
    assert weights([2.0, 0.5], **wide) == pytest.approx([1.414214, 0.5], abs=1e-6)
    both = {"half_life": 1, "weight_range": 0.2}
    assert weights([2.0, 0.5], **both, high_only=False) == pytest.approx([1.2, 0.8])
    assert weights([2.0, 0.5], **both) == pytest.approx([1.2, 1.0])
    ratios = [math.exp(e) for e in (0.05, -0.02, 0.1, 0.03)]
    wanted = [1.166843, 1.112473, 1.138097, 1.030455]
    found = weights(ratios, half_life=32, weight_range=0, high_only=False)
    assert found == pytest.approx(wanted, abs=1e-6)


def test_ratios_beyond_the_dual_clip_have_no_part_and_bad_tokens_are_not_raised() -> None:
    fields = {"half_life": 1, "weight_range": 0.5, "high_only": False, "dual_clip_c": 3.0}
    assert weights([1.0, 20.0], **fields) == pytest.approx([1.0, 1.0])
    raised = weights([1.0, 5.0], -1.0, **(fields | {"dual_clip_c": 10.0}))
    assert raised == pytest.approx([1.5, 1.0]), "the second has A < 0 and a ratio above 4"


def test_fipo_is_ppo_on_policy_and_times_its_weight_off_policy() -> None:
    batch, new = policy_batch(seed=2, on_policy=True)
    bounds = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip_c": 10.0}
    fipo, ppo = objective_of(build_loss("fipo")), objective_of(build_loss("ppo_clip", bounds))
    torch.testing.assert_close(total_and_grad(fipo, batch, new), total_and_grad(ppo, batch, new))
    batch, new = policy_batch(seed=2, spread=0.6)
    result = build_loss("fipo").token_loss(new, batch)
    plain = build_loss("ppo_clip", bounds).token_loss(new, batch)
    torch.testing.assert_close(result.loss, result.metrics["fipo/weight"] * plain.loss)


def test_an_answer_with_many_dual_clipped_tokens_takes_no_loss() -> None:
    ratios, bad = [[20.0, 20.0, 1.0], [20.0, 1.0, 1.0]], [[-1.0] * 3] * 2
    result, grad = token_loss("fipo", ratios, bad, max_dual_clipped=1)
    assert not result.loss[0].any() and result.loss[1].all() and result.mask.all()
    assert not grad[0].any() and grad[1, 1:].all()


def group_of(scores: list[float], right: list[bool], lengths: list[int]) -> RolloutBatch:
    """One group whose answers have these means of the log ratio."""
    mask = (torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]).double()
    now = torch.tensor(scores, dtype=torch.float64)[:, None].expand(mask.shape).clone()
    sign = torch.tensor([1.0 if r else -1.0 for r in right], dtype=torch.float64)
    return build_batch(
        mask,
        group_id=[0] * len(scores),
        old_logprobs=torch.zeros_like(mask),
        logprobs_now=now,
        advantages=sign[:, None].expand(mask.shape).clone(),
        acc=(sign > 0).double(),
    )


def direct(new: Tensor, batch: RolloutBatch, tau: float) -> Tensor:
    """L of a batch from its definition."""
    total = torch.zeros((), dtype=torch.float64)
    for group in batch.group_id.unique():
        sides: dict[bool, list[Tensor]] = {True: [], False: []}
        for row in (batch.group_id == group).nonzero().squeeze(1):
            taken = batch.mask[row].bool()
            if taken.any():
                score = (new[row] - batch.column("old_logprobs")[row])[taken].mean()
                sides[bool(batch.column("acc")[row] >= 1)].append(score)
        if sides[True] and sides[False]:
            for right, sign in ((True, -1), (False, 1)):
                total = (
                    total
                    + torch.stack([(sign * s / tau).exp() for s in sides[right]]).sum().log1p()
                )
    present = batch.group_id[batch.mask.bool().any(dim=1)].unique()
    return total / len(present)


def test_a_group_by_hand() -> None:
    batch = group_of([0.2, -0.1, 0.1, -0.3], [True, True, False, False], [2, 1, 3, 1])
    for positive in ("advantage", "acc"):
        loss = build_loss("real", {"positive": positive})
        prepared = loss.prepare(batch, torch.Generator())
        assert prepared.metrics["real/loss"] == pytest.approx(2.080777, abs=1e-6)
        slopes = (prepared.columns["slope"] / 4).tolist()
        wanted = [-0.463613, -0.844758, 0.881811, 0.396223]
        assert slopes == pytest.approx(wanted, abs=1e-6)
    even = group_of([0.0] * 4, [True, True, False, False], [1] * 4)
    prepared = build_loss("real").prepare(even, torch.Generator())
    assert prepared.metrics["real/loss"] == pytest.approx(2 * math.log(3))
    assert prepared.columns["slope"].abs().tolist() == pytest.approx([4 * 2 / 3] * 4)


def test_one_sided_groups_have_no_gradient_and_count() -> None:
    batch = group_of([0.2, -0.1, 0.4, 0.3], [True, False, True, True], [1] * 4)
    alone = build_loss("real").prepare(batch.select(torch.arange(2)), torch.Generator())
    split = group_of([0.2, -0.1, 0.4, 0.3], [True, False, True, True], [1] * 4)
    split = split.with_columns(group_id=torch.tensor([0, 0, 1, 1]))
    found = build_loss("real").prepare(split, torch.Generator())
    assert found.metrics["real/loss"] == pytest.approx(alone.metrics["real/loss"] / 2)
    assert not found.columns["slope"][2:].any() and found.columns["slope"][:2].all()


def test_the_gradient_is_that_of_the_definition_however_it_is_cut() -> None:
    batch, new = policy_batch(seed=8)
    loss = build_loss("real", {"positive": "acc"})
    leaf = new.clone().requires_grad_()
    value = direct(leaf, batch, 0.5)
    (wanted,) = torch.autograd.grad(value, leaf)
    assert wanted.any()
    metric = loss.prepare(batch, torch.Generator()).metrics["real/loss"]
    assert metric == pytest.approx(value.item())
    for ranks in (None, [[[7, 0], [3, 6, 1]], [[5], [2, 4]]]):
        cut = () if ranks is None else (ranks,)
        objective = objective_of(loss, "seq-mean-token-mean")
        _, grad = total_and_grad(objective, batch, new, *cut)
        torch.testing.assert_close(grad, wanted, rtol=1e-9, atol=1e-12)
