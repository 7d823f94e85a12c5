"""The seven aggregators, on worked examples; invariance is in tests/unit/policy_losses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain.core.contracts import Aggregator, Counts, TokenLoss
from posttrain.core.errors import ConfigError
from posttrain.core.plugin_manager import PluginManager

MANAGER = PluginManager()
FIELDS: dict[str, dict[str, object]] = {"seq-mean-token-sum-norm": {"norm_length": 8}}


def build(name: str, **fields: object) -> Aggregator[Any]:
    return MANAGER.build(Aggregator, name, FIELDS.get(name, {}) | fields)


def two_rows(second_length: int) -> tuple[Tensor, Tensor, Counts]:
    """Losses and mask of a response [1, 1] and one of `second_length` times 0.7, with counts."""
    mask = torch.zeros(2, max(2, second_length), dtype=torch.float64)
    mask[0, :2] = 1
    mask[1, :second_length] = 1
    loss = torch.full_like(mask, 0.7)
    loss[0] = 1.0
    return loss, mask, Counts(float(mask.sum()), 2.0)


@pytest.mark.parametrize(
    ("name", "value", "first", "second"),
    [
        ("seq-mean-token-mean", 0.85, 0.25, 0.0625),
        ("token-mean", 0.76, 0.1, 0.1),
        ("seq-mean-token-sum", 3.8, 0.5, 0.5),
        ("seq-sum-token-mean", 1.7, 0.5, 0.125),
        ("token-sum", 7.6, 1.0, 1.0),
        ("seq-mean-token-sum-norm", 0.475, 0.0625, 0.0625),
    ],
)
def test_value_and_weight_of_each_token(
    name: str, value: float, first: float, second: float
) -> None:
    loss, mask, counts = two_rows(8)
    loss.requires_grad_()
    total = build(name).aggregate(TokenLoss(loss, mask), mask, counts)
    (grad,) = torch.autograd.grad(total, loss)
    assert total.item() == pytest.approx(value)
    assert grad[0, 0].item() == pytest.approx(first) and grad[0, 2:].abs().max().item() == 0.0
    assert grad[1].tolist() == pytest.approx([second] * 8)


def test_a_long_answer_weighs_by_its_tokens_only_under_the_token_mean() -> None:
    loss, mask, counts = two_rows(88)
    by_token = build("token-mean").weights(mask, counts)
    by_sequence = build("seq-mean-token-mean").weights(mask, counts)
    assert (loss * by_token)[1, 0].item() == pytest.approx(0.7 / 90)
    assert by_token[1].sum().item() == pytest.approx(88 / 90)
    assert (loss * by_token).sum().item() == pytest.approx(63.6 / 90)
    assert (loss * by_sequence)[1, 0].item() == pytest.approx(0.003977273, abs=1e-9)
    assert by_sequence[1].sum().item() == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [("seq-mean-token-mean", 0.5, 0.25), ("seq-sum-token-mean", 1.0, 0.5)],
)
def test_an_answer_of_one_token_has_the_whole_weight_of_its_row(
    name: str, first: float, second: float
) -> None:
    mask = torch.tensor([[True, False], [True, True], [False, False]])
    weights = build(name).weights(mask, Counts(3.0, 2.0))
    assert weights.tolist() == [[first, 0.0], [second, second], [0.0, 0.0]]


def test_micro_batches_add_up_and_are_not_averaged() -> None:
    loss, mask, counts = two_rows(8)
    parts = [
        build("token-mean")
        .aggregate(TokenLoss(loss[i : i + 1], mask[i : i + 1]), mask[i : i + 1], counts)
        .item()
        for i in range(2)
    ]
    assert parts == pytest.approx([0.2, 0.56])


def test_dropping_tokens_from_the_loss_does_not_change_what_is_divided_by() -> None:
    loss, mask, counts = two_rows(8)
    kept = mask.clone()
    kept[1, 4:] = 0
    loss[1, 4:] = float("nan")
    total = build("token-mean").aggregate(TokenLoss(loss, kept), mask, counts)
    assert total.item() == pytest.approx((2.0 + 4 * 0.7) / 10)


@pytest.mark.parametrize("name", [entry.name for entry in MANAGER.entries("aggregator")])
def test_a_mini_batch_without_tokens_gives_zero_and_not_nan(name: str) -> None:
    mask = torch.zeros(2, 3, dtype=torch.bool)
    loss = torch.ones(2, 3, requires_grad=True)
    aggregator = build(name)
    counts = aggregator.count(mask, torch.tensor([0, 1]))
    total = aggregator.aggregate(TokenLoss(loss, mask), mask, counts)
    (grad,) = torch.autograd.grad(total, loss)
    assert total.item() == 0.0 and grad.abs().max().item() == 0.0


def test_a_prompt_counts_once_whatever_its_number_of_answers_and_tokens() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]])
    group_id = torch.tensor([4, 4, 4, 9, 2])
    aggregator = build("prompt-mean")
    counts = aggregator.count(mask, group_id)
    weights = aggregator.weights(mask, counts)
    assert counts.num_groups == 2 and weights.dtype == torch.float64
    assert weights[0].tolist() == [0.125, 0.125, 0.125, 0] and weights[1, 0] == 0.125
    assert weights[3].tolist() == [0.25, 0.25, 0, 0]
    # A micro-batch has part of a prompt, and still divides by all of it.
    rows = torch.tensor([3, 1])
    part = aggregator.weights(mask[rows], counts.rows(rows))
    assert torch.equal(part, weights[rows])


def test_a_prompt_mean_without_prompts_is_an_error() -> None:
    with pytest.raises(ValueError, match="count with group_id"):
        build("prompt-mean").weights(torch.ones(1, 1), Counts(1.0, 1.0))


def test_the_norm_length_must_be_known_when_it_is_used() -> None:
    aggregator = MANAGER.build(Aggregator, "seq-mean-token-sum-norm")
    _, mask, counts = two_rows(8)
    with pytest.raises(ValueError, match="norm_length"):
        aggregator.weights(mask, counts)
    with pytest.raises(ConfigError, match="norm_length"):
        build("seq-mean-token-sum-norm", norm_length=0)


def test_dividing_by_the_length_alone_makes_the_loss_grow_with_the_batch() -> None:
    loss, mask, counts = two_rows(8)
    whole = build("seq-mean-token-sum-norm", verl_compat=True)
    assert whole.aggregate(TokenLoss(loss, mask), mask, counts).item() == pytest.approx(0.95)


def test_empty_answers_are_counted_only_on_request() -> None:
    mask = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    loss = TokenLoss(torch.ones(2, 2), mask)
    for counted, value in ((False, 1.0), (True, 0.5)):
        aggregator = build("seq-mean-token-mean", count_empty_seqs=counted)
        total = aggregator.aggregate(loss, mask, aggregator.count(mask))
        assert total.item() == pytest.approx(value)


def test_counts_can_be_given() -> None:
    loss, mask, _ = two_rows(8)
    for name, fields, value in (
        ("token-mean", {"num_tokens": 19.0}, 7.6 / 19),
        ("seq-mean-token-mean", {"num_seqs": 4.0}, 1.7 / 4),
    ):
        aggregator = build(name, **fields)
        total = aggregator.aggregate(TokenLoss(loss, mask), mask, aggregator.count(mask))
        assert total.item() == pytest.approx(value)


def test_local_counts_average_the_micro_batches_and_must_be_meant() -> None:
    with pytest.raises(ConfigError, match="allow_local"):
        build("token-mean", counts="micro")
    loss, mask, _ = two_rows(8)
    aggregator = build("token-mean", counts="micro", allow_local=True)
    counts = replace(aggregator.count(mask), num_parts=2)
    parts = [
        aggregator.aggregate(TokenLoss(loss[i : i + 1], mask[i : i + 1]), mask[i : i + 1], counts)
        for i in range(2)
    ]
    # The mean of the local means, 1 and 0.7, instead of the token mean 0.76.
    assert sum(part.item() for part in parts) == pytest.approx(0.85)


def test_ranks_average_their_gradients_so_each_adds_up_to_more() -> None:
    loss, mask, counts = two_rows(8)
    on_two = build("token-mean").aggregate(
        TokenLoss(loss, mask), mask, replace(counts, num_ranks=2)
    )
    assert on_two.item() == pytest.approx(1.52)
