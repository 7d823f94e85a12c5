"""The six aggregators, on worked examples; invariance under splitting is in the contract tests."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from posttrain.core.contracts import Aggregator, Counts, TokenLoss
from posttrain.core.errors import ConfigError
from posttrain.core.plugin_manager import PluginManager

MANAGER = PluginManager()
FIELDS: dict[str, dict[str, object]] = {"seq-mean-token-sum-norm": {"norm_length": 8}}


def build(name: str) -> Aggregator:  # type: ignore[type-arg]
    return MANAGER.build(Aggregator, name, FIELDS.get(name))


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
    total = build(name).aggregate(TokenLoss(loss, mask), mask, Counts(0.0, 0.0))
    (grad,) = torch.autograd.grad(total, loss)
    assert total.item() == 0.0 and grad.abs().max().item() == 0.0


def test_the_norm_length_has_no_default() -> None:
    with pytest.raises(ConfigError, match="norm_length: Field required"):
        MANAGER.build(Aggregator, "seq-mean-token-sum-norm")
