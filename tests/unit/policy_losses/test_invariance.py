"""Every policy loss under every aggregator: how the work is cut up changes nothing.

Value and gradient to 1e-9 in float64, with whatever a loss prepares taken from the whole
mini-batch. The losses are those that are installed, so a new one is held to it too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain.core.config.coefficients import CoefSchedule
from posttrain.core.contracts import KlEstimator, RolloutCorrection
from posttrain.core.training.objective import LossTerm, Objective
from tests.helpers.losses import (
    ACTIVE,
    MANAGER,
    build_aggregator,
    build_loss,
    objective_of,
    policy_batch,
    total_and_grad,
    widened,
)

LOSSES = [entry.name for entry in MANAGER.entries("policy_loss")]
AGGREGATORS = [entry.name for entry in MANAGER.entries("aggregator")]

# Rows of the micro-batches of each rank. Rows 2 and 6 have no tokens.
CUTS: dict[str, list[list[list[int]]]] = {
    "one row each": [[[row] for row in range(8)]],
    "rows mixed": [[[7, 0], [3, 6, 1], [5, 2, 4]]],
    "two ranks": [[[0, 5], [1]], [[2, 3, 4, 6, 7]]],
    "a rank without tokens": [[[0, 1, 3], [4, 5, 7]], [[2], [6]]],
    "a rank without rows": [[[0, 1, 2, 3, 4, 5, 6, 7]], []],
}


def active(name: str) -> Any:
    return build_loss(name, ACTIVE.get(name))


def assert_same(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], what: str = "") -> None:
    torch.testing.assert_close(
        got, wanted, rtol=1e-9, atol=1e-12, msg=lambda message: f"{what}: {message}"
    )


def assert_alive(value: Tensor, grad: Tensor) -> None:
    assert value.isfinite() and grad.isfinite().all() and grad.abs().max() > 0


@pytest.mark.parametrize("aggregator", AGGREGATORS)
@pytest.mark.parametrize("name", LOSSES)
def test_the_cut_into_micro_batches_and_ranks_does_not_matter(name: str, aggregator: str) -> None:
    objective = objective_of(active(name), aggregator)
    batch, new = policy_batch(seed=1)
    whole = total_and_grad(objective, batch, new)
    assert_alive(*whole)
    for cut, ranks in CUTS.items():
        got = total_and_grad(objective, batch, new, ranks)
        assert_same(got, whole, cut)


@pytest.mark.parametrize("aggregator", AGGREGATORS)
@pytest.mark.parametrize("name", LOSSES)
def test_neither_padding_nor_the_order_of_rows_matters(name: str, aggregator: str) -> None:
    objective = objective_of(active(name), aggregator)
    batch, new = policy_batch(seed=2)
    value, grad = total_and_grad(objective, batch, new)
    wide_value, wide_grad = total_and_grad(objective, *widened(batch, new, 3))
    assert_same((wide_value, wide_grad[:, :-3]), (value, grad))
    assert torch.equal(wide_grad[:, -3:], torch.zeros_like(wide_grad[:, -3:]))
    order = torch.tensor([5, 2, 7, 0, 4, 1, 6, 3])
    shuffled = total_and_grad(objective, batch.select(order), new[order])
    assert_same(shuffled, (value, grad[order]))


@pytest.mark.parametrize("name", LOSSES)
def test_what_stands_under_the_mask_changes_neither_value_nor_gradient(name: str) -> None:
    objective = objective_of(active(name))
    batch, new = policy_batch(seed=3)
    taken = batch.mask.bool()
    clean = total_and_grad(objective, batch, new)
    for junk in (0.7, float("nan"), float("inf"), -float("inf")):
        columns = {
            column: torch.where(taken, batch.column(column), junk)
            for column in ("old_logprobs", "rollout_logprobs", "logprobs_now", "advantages")
        }
        dirty = batch.with_columns(**columns)
        got = total_and_grad(objective, dirty, torch.where(taken, new, junk))
        assert torch.equal(got[0], clean[0]) and torch.equal(got[1], clean[1])
        assert torch.equal(got[1][~taken], torch.zeros_like(got[1][~taken]))


@pytest.mark.parametrize("lengths", [[1, 1, 1], [0, 1, 0], [0, 0, 0]])
@pytest.mark.parametrize("name", LOSSES)
def test_answers_of_one_token_and_of_none_are_finite(name: str, lengths: list[int]) -> None:
    for aggregator in AGGREGATORS:
        batch, new = policy_batch(4, lengths, [0, 0, 1])
        value, grad = total_and_grad(objective_of(active(name), aggregator), batch, new)
        assert value.isfinite() and grad.isfinite().all()
        if not any(lengths):
            assert value == 0 and not grad.any()


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("name", ["ppo_clip", "gmpo", "vespo", "vanilla_pg", "bapo", "clip_cov"])
def test_with_every_other_part_of_the_objective_on(
    name: str, bypass: bool, renormalise: bool
) -> None:
    terms = (
        LossTerm(active(name), build_aggregator("seq-mean-token-mean")),
        LossTerm(build_loss("positive_lm"), build_aggregator("token-mean"), 0.1),
    )
    correction = MANAGER.build(
        RolloutCorrection, "tis_token", {"reject": [{"stat": "k3", "level": "token", "high": 0.01}]}
    )
    objective = Objective(
        terms,
        build_aggregator("prompt-mean"),
        kl=MANAGER.build(KlEstimator, "k3_is", {"is_ratio": "policy"}),
        entropy_coef=0.1,
        entropy_aggregator=build_aggregator("seq-mean-token-sum"),
        correction=correction,
        bypass_old=bypass,
        renormalise=renormalise,
        top_entropy=0.6,
    )
    batch, new = policy_batch(seed=5)
    whole = total_and_grad(objective, batch, new, kl_coef=0.2)
    assert_alive(*whole)
    for cut, ranks in CUTS.items():
        assert_same(total_and_grad(objective, batch, new, ranks, kl_coef=0.2), whole, cut)


@pytest.mark.parametrize("aggregator", AGGREGATORS)
def test_teachers_that_count_alike_and_a_coefficient_that_moves(aggregator: str) -> None:
    """Three teachers, one of whom judges nothing, next to a scheduled term."""
    mu, average = CoefSchedule(warmup=10, peak=0.5, complement=True), build_aggregator(aggregator)
    taught = LossTerm(build_loss("ref_kl"), average, rest_of=mu, num_teachers=3)
    terms = (taught, LossTerm(build_loss("positive_lm"), build_aggregator("token-mean"), mu))
    batch, new = policy_batch(seed=6)
    batch = batch.with_columns(teacher_id=torch.tensor([0, 0, 1, 0, 1, -1, 0, 1]))
    objective = Objective(terms, average)
    whole = total_and_grad(objective, batch, new, step=5)
    assert_alive(*whole)
    for cut, ranks in CUTS.items():
        assert_same(
            total_and_grad(Objective(terms, average), batch, new, ranks, step=5), whole, cut
        )


def test_local_counts_do_depend_on_the_cut() -> None:
    """What the default protects from: with `counts: micro` the same cuts change the result."""
    aggregator = build_aggregator("token-mean", {"counts": "micro", "allow_local": True})
    loss = build_loss("ppo_clip")
    objective = Objective((LossTerm(loss, aggregator),), aggregator)
    batch, new = policy_batch(seed=1)
    whole, _ = total_and_grad(objective, batch, new)
    parts, _ = total_and_grad(objective, batch, new, [[[0, 1, 2, 3, 4, 5, 6], [7]]])
    assert abs(float(whole - parts)) > 1e-3
