"""Worked examples that teachers give: weights of aggregation modes, length, split batches.

The numbers were derived by hand, some of them against published mistakes.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from posttrain.core.contracts import AdvantageEstimator, Aggregator, TokenLoss
from posttrain.core.kit.batches import build_batch
from posttrain.core.plugin_manager import PluginManager

F64 = torch.float64


def two_rows(short: int, long: int) -> tuple[Tensor, Tensor]:
    """Losses 1 in a response of `short` tokens and 0.7 in one of `long`, and the mask."""
    mask = torch.arange(long)[None, :] < torch.tensor([[short], [long]])
    loss = torch.where(mask, torch.tensor([[1.0], [0.7]], dtype=F64), torch.zeros((), dtype=F64))
    return loss.requires_grad_(), mask.to(F64)


def aggregate(
    manager: PluginManager, name: str, loss: Tensor, mask: Tensor, **fields: object
) -> tuple[float, Tensor]:
    """The scalar, and the weight of each token."""
    aggregator = manager.build(Aggregator, name, fields)
    value = aggregator.aggregate(TokenLoss(loss, mask), mask, aggregator.count(mask))
    (weights,) = torch.autograd.grad(value, loss)
    return float(value.detach()), weights


# mode, fields, scalar, weight of a token of the short and of the long response
MODES: list[tuple[str, dict[str, object], float, float, float]] = [
    ("seq-mean-token-mean", {}, 0.85, 0.25, 0.0625),
    ("token-mean", {}, 0.76, 0.1, 0.1),
    ("seq-mean-token-sum", {}, 3.8, 0.5, 0.5),
    ("seq-sum-token-mean", {}, 1.7, 0.5, 0.125),
    ("token-sum", {}, 7.6, 1.0, 1.0),
    ("seq-mean-token-sum-norm", {"norm_length": 8}, 0.475, 0.0625, 0.0625),
]


@pytest.mark.parametrize(("name", "fields", "scalar", "short", "long"), MODES)
def test_what_each_mode_makes_of_two_and_eight_tokens(
    manager: PluginManager,
    name: str,
    fields: dict[str, object],
    scalar: float,
    short: float,
    long: float,
) -> None:
    loss, mask = two_rows(2, 8)
    value, weights = aggregate(manager, name, loss, mask, **fields)
    assert value == pytest.approx(scalar, abs=1e-12)
    assert weights[0, :2].tolist() == pytest.approx([short] * 2)
    assert weights[1].tolist() == pytest.approx([long] * 8)
    if name == "seq-mean-token-mean":
        assert 0.7 * float(weights[1, 0]) == pytest.approx(0.04375)


def test_halves_of_a_batch_add_up_and_their_means_do_not(manager: PluginManager) -> None:
    """Token mean over {s1}, {s2}: 0.2 + 0.56 = 0.76; the mean of the local means would be 0.85."""
    loss, mask = two_rows(2, 8)
    mean = manager.build(Aggregator, "token-mean")
    counts = mean.count(mask)
    shares, local = [], []
    for row in range(2):
        part, own = TokenLoss(loss[[row]], mask[[row]]), mask[[row]]
        shares.append(float(mean.aggregate(part, own, counts).detach()))
        local.append(float(mean.aggregate(part, own, mean.count(own)).detach()))
    assert shares == pytest.approx([0.2, 0.56]) and sum(shares) == pytest.approx(0.76)
    assert sum(local) / 2 == pytest.approx(0.85)


def test_a_long_response_has_the_share_of_its_tokens_under_a_token_mean(
    manager: PluginManager,
) -> None:
    """2 + 88 tokens are 90, not 100: each weighs 1/90, and the long response 88/90 of all."""
    loss, mask = two_rows(2, 88)
    value, weights = aggregate(manager, "token-mean", loss, mask)
    assert value == pytest.approx(63.6 / 90)
    assert float(weights[1].sum()) == pytest.approx(88 / 90)
    assert 0.7 * float(weights[1, 0]) == pytest.approx(0.007777778, abs=1e-9)
    _, diluted = aggregate(manager, "seq-mean-token-mean", loss, mask)
    assert 0.7 * float(diluted[1, 0]) == pytest.approx(0.003977273, abs=1e-9)


# A: 2 tokens, right. B: 6 tokens, right. C: 6 tokens, wrong.
LENGTHS = (2, 6, 6)
REWARDS = (1.0, 1.0, -1.0)
ADVANTAGES: list[tuple[str, dict[str, object], tuple[float, float, float]]] = [
    ("dr_grpo", {}, (2 / 3, 2 / 3, -4 / 3)),
    ("grpo", {"eps": 0.0}, (0.577350, 0.577350, -1.154700)),
    ("grpo", {"eps": 0.0, "ddof": 0}, (0.707107, 0.707107, -1.414214)),
    ("rloo", {}, (1.0, 1.0, -2.0)),
    ("opo", {}, (0.857143, 0.857143, -1.142857)),
    ("max_rl", {}, (2.0, 2.0, -4.0)),
]


@pytest.mark.parametrize(("name", "fields", "wanted"), ADVANTAGES)
def test_advantages_of_a_short_a_long_and_a_wrong_answer(
    manager: PluginManager,
    name: str,
    fields: dict[str, object],
    wanted: tuple[float, float, float],
) -> None:
    mask = (torch.arange(6)[None, :] < torch.tensor(LENGTHS)[:, None]).to(F64)
    rewards = torch.zeros(3, 6, dtype=F64)
    for row, (length, reward) in enumerate(zip(LENGTHS, REWARDS, strict=True)):
        rewards[row, length - 1] = reward
    batch = build_batch(mask, group_id=[0, 0, 0], token_rewards=rewards)
    advantages = manager.build(AdvantageEstimator, name, fields).estimate(batch).advantages
    for row, value in enumerate(wanted):
        assert advantages[row, : LENGTHS[row]].tolist() == pytest.approx(
            [value] * LENGTHS[row], abs=1e-5
        )


@pytest.mark.parametrize(
    ("name", "fields", "wanted"),
    [
        ("seq-mean-token-mean", {}, (1 / 9, 1 / 27, -2 / 27)),
        ("token-mean", {}, (0.047619, 0.047619, -0.095238)),
        ("seq-mean-token-sum-norm", {"norm_length": 6}, (1 / 27, 1 / 27, -2 / 27)),
    ],
)
def test_what_length_does_to_a_tokens_pull(
    manager: PluginManager, name: str, fields: dict[str, object], wanted: tuple[float, ...]
) -> None:
    """Under a sequence mean a token of the long right answer pulls a third as much."""
    mask = (torch.arange(6)[None, :] < torch.tensor(LENGTHS)[:, None]).to(F64)
    advantages = torch.tensor([[2 / 3], [2 / 3], [-4 / 3]], dtype=F64)
    logprobs = torch.zeros(3, 6, dtype=F64, requires_grad=True)
    aggregator = manager.build(Aggregator, name, fields)
    loss = aggregator.aggregate(
        TokenLoss(-advantages * logprobs, mask), mask, aggregator.count(mask)
    )
    (grad,) = torch.autograd.grad(loss, logprobs)
    for row, value in enumerate(wanted):
        assert (-grad[row, : LENGTHS[row]]).tolist() == pytest.approx(
            [value] * LENGTHS[row], abs=1e-6
        )


def test_accumulating_without_dividing_doubles_the_gradient() -> None:
    """y = a x0 + b x1 + c at (1, 2, 3) on (0, 10) and (10, 0) with targets 0."""
    x = torch.tensor([[0.0, 10.0, 1.0], [10.0, 0.0, 1.0]], dtype=F64)
    start = torch.tensor([1.0, 2.0, 3.0], dtype=F64)

    def gradient(divisor: float, rows: list[list[int]]) -> list[float]:
        weights = start.clone().requires_grad_()
        for part in rows:
            ((x[part] @ weights).square().sum() / divisor).backward()
        assert weights.grad is not None
        return weights.grad.tolist()

    assert float((x @ start).square().mean()) == 349
    assert gradient(2, [[0, 1]]) == [130, 230, 36]
    assert gradient(2, [[0], [1]]) == [130, 230, 36], "divided by the global count"
    assert gradient(1, [[0], [1]]) == [260, 460, 72], "each part by its own"
