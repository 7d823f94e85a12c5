"""Rows of the head: chosen for the device, shared by tokens, known before: without influence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from posttrain.core.math.nucleus import Cut
from posttrain.core.training import logprobs
from posttrain.core.training.head_targets import KnownLogits
from posttrain.core.training.known_products import KnownProducts
from posttrain.core.training.logprobs import cut_logprobs, token_logprobs


def values_and_gradients() -> list[Tensor]:
    numbers = torch.Generator().manual_seed(0)
    hidden = torch.randn(70, 8, generator=numbers, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(30, 8, generator=numbers, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(30, (70,), generator=numbers)
    values, entropy = token_logprobs(hidden, weight, targets, temperature=0.7)
    (values.sum() + 0.1 * entropy.sum()).backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None and weight.grad is not None
    return [values.detach(), entropy.detach(), hidden.grad, weight.grad]


def test_rows_at_a_time_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = values_and_gradients()
    used: list[str] = []
    monkeypatch.setattr(
        logprobs, "chunk_rows", lambda device, row_bytes: used.append("chunk") or 20
    )
    monkeypatch.setattr(logprobs, "block_rows", lambda device: used.append("block") or 6)
    for left, right in zip(whole, values_and_gradients(), strict=True):
        torch.testing.assert_close(left, right)
    assert set(used) == {"chunk", "block"}


@pytest.mark.parametrize("cut", [Cut(), Cut(12, 0.8)])
@pytest.mark.parametrize("way", ["shared", "known", "spent"])
def test_tokens_that_follow_one_state(cut: Cut, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against each token with a state of its own. Of the known logits every third is not used."""
    monkeypatch.setattr(logprobs, "block_rows", lambda device: 6)
    numbers = torch.Generator().manual_seed(0)
    own = torch.randn(40, 8, generator=numbers, dtype=torch.float64)
    weight = torch.randn(30, 8, generator=numbers, dtype=torch.float64, requires_grad=True)
    rows = torch.cat([torch.randint(40, (60,), generator=numbers), torch.arange(40)])
    targets = torch.randint(30, (100,), generator=numbers)
    shares = torch.randn(2, 100, generator=numbers, dtype=torch.float64)
    drawn = 3 * torch.randperm(40, generator=numbers)
    values = torch.randn(120, 30, generator=numbers, dtype=torch.float64)
    values[drawn] = own @ weight.detach().t()
    before = values.clone()

    def found(order: Tensor, like: Tensor | None, known: KnownLogits | None) -> list[Tensor]:
        hidden = own.clone().requires_grad_()
        weight.grad = None
        value, entropy, kept = cut_logprobs(
            hidden[order], weight, targets, cut, rows=like, temperature=0.7, chunk=16, known=known
        )
        (shares * torch.stack([value, entropy])).sum().backward()  # type: ignore[no-untyped-call]
        assert hidden.grad is not None and weight.grad is not None
        return [value.detach(), entropy.detach(), kept, hidden.grad, weight.grad.clone()]

    wanted = found(rows, None, None)
    products = KnownProducts({}, drawn, values if way != "shared" else None, drawn, way == "spent")
    got = found(*products.in_order(torch.arange(40), rows))
    for left, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(left, right)
    assert torch.equal(values, before) == (way != "spent")


def test_a_gpu_takes_more_rows_at_a_time() -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert logprobs.chunk_rows(gpu, 300_000) > logprobs.chunk_rows(cpu, 300_000)
    assert logprobs.block_rows(gpu) > logprobs.block_rows(cpu)


@pytest.mark.parametrize("row_bytes", [200, 98_304, 304_000, 10**9])
def test_a_chunk_of_logits_is_bounded_by_its_bytes(row_bytes: int) -> None:
    rows = logprobs.chunk_rows(torch.device("cpu"), row_bytes)
    block = logprobs.block_rows(torch.device("cpu"))
    assert rows % block == 0
    assert rows == block or rows * row_bytes <= 256 * 2**20 < (rows + block) * row_bytes
