"""Rows of the head's chunks and blocks: chosen for the device, and without influence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from posttrain.core.training import logprobs
from posttrain.core.training.logprobs import token_logprobs


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
