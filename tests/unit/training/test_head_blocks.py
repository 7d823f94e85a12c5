"""Rows of the head: chosen for the device, shared by tokens, known before, compiled: no matter."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor

from posttrain.core.data.tokens import response_batch
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.math.nucleus import Cut
from posttrain.core.models.device import ModelRuntime
from posttrain.core.models.layers import compile_layers
from posttrain.core.models.loading import load_policy
from posttrain.core.models.sampled_outputs import FoundOutputs
from posttrain.core.training import logprobs
from posttrain.core.training.forward import check_passes, forward_only, logits_in_order
from posttrain.core.training.logprobs import (
    PLAIN,
    BlockMath,
    KnownLogits,
    block_math,
    cut_logprobs,
    why_plain,
)


def values_and_gradients() -> list[Tensor]:
    numbers = torch.Generator().manual_seed(0)
    hidden = torch.randn(70, 8, generator=numbers, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(30, 8, generator=numbers, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(30, (70,), generator=numbers)
    values, entropy, _ = cut_logprobs(hidden, weight, targets, Cut(), temperature=0.7)
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
@pytest.mark.parametrize("compiled", [False, True])
def test_tokens_that_follow_one_state(
    cut: Cut, way: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
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
            hidden[order],
            weight,
            targets,
            cut,
            rows=like,
            temperature=0.7,
            chunk=16,
            known=known,
            compiled=compiled and like is not None,
        )
        (shares * torch.stack([value, entropy])).sum().backward()  # type: ignore[no-untyped-call]
        assert hidden.grad is not None and weight.grad is not None
        return [value.detach(), entropy.detach(), kept, hidden.grad, weight.grad.clone()]

    wanted = found(rows, None, None)
    logits = None if way == "shared" else values
    recorded = FoundOutputs({}, drawn, logits, drawn, last=way == "spent")
    got = found(*logits_in_order(recorded, torch.arange(40), rows))
    for left, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(left, right)
    assert torch.equal(values, before) == (way != "spent")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("entropy_share", [0.0, 0.1])
def test_values_and_gradients_are_those_of_a_plain_softmax(
    entropy_share: float, compiled: bool
) -> None:
    numbers = torch.Generator().manual_seed(0)
    parts = [torch.randn(n, 8, generator=numbers, dtype=torch.float64) for n in (20, 30)]
    targets = torch.randint(30, (20,), generator=numbers)
    shares = torch.randn(20, generator=numbers, dtype=torch.float64)

    def found(plain: bool) -> list[Tensor]:
        hidden, weight = (part.clone().requires_grad_() for part in parts)
        if plain:
            distribution = (hidden @ weight.t() / 0.7).log_softmax(dim=-1)
            values, entropy = (
                distribution.gather(1, targets[:, None])[:, 0],
                -(distribution.exp() * distribution).sum(dim=1),
            )
        else:
            values, entropy, _ = cut_logprobs(
                hidden, weight, targets, Cut(), temperature=0.7, chunk=7, compiled=compiled
            )
        (shares @ (values + entropy_share * entropy)).backward()  # type: ignore[no-untyped-call]
        assert hidden.grad is not None and weight.grad is not None
        return [values.detach(), entropy.detach(), hidden.grad, weight.grad]

    for left, right in zip(found(plain=False), found(plain=True), strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.slow), 0.7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_compiled_blocks_give_what_plain_ones_do(dtype: torch.dtype, temperature: float) -> None:
    """For any number of rows, of large logits and of a token that cannot be.

    Sums are those of the plain way. Gradients are compared with float64: where the sums differ in
    their last digit, as they do from one processor's exp to another's, exp makes a relative error
    of it: eps times the logit.
    """
    cpu, numbers = torch.device("cpu"), torch.Generator().manual_seed(0)
    plain, compiled = block_math(cpu, compiled=False), block_math(cpu, compiled=True)
    assert compiled is not plain
    wide = torch.promote_types(dtype, torch.float32)
    close = 1e-13 if wide == torch.float64 else 2e-6

    def found(math: BlockMath, logits: Tensor, shares: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        top, log_total, entropy = math.scores(logits, 1 / temperature)
        given = (logits, 1 / temperature, top + log_total, shares[0])
        grads = [math.gradient(*given), math.entropy_gradient(*given, entropy, shares[1])]
        return [top, log_total, entropy], grads

    for rows in (1, 5, 64):
        logits = 20 * torch.randn(rows, 300, generator=numbers, dtype=torch.float64)
        logits = logits.to(dtype)
        before = logits.clone()
        shares = torch.randn(2, rows, generator=numbers, dtype=torch.float64).to(wide)
        sums, grads = found(plain, logits, shares)
        compiled_sums, compiled_grads = found(compiled, logits, shares)
        for got, want in zip(compiled_sums, sums, strict=True):
            assert got.dtype == want.dtype == wide
            torch.testing.assert_close(got, want, rtol=close, atol=close)
        exact = found(plain, logits.double(), shares.double())[1]
        gap = 4 * torch.finfo(wide).eps * float(logits.abs().max()) / temperature
        # log p + H can be next to nothing where p is not, so that its rounding is not a share of
        # it.
        bounds = (close, gap)
        for got, want, least in zip([*grads, *compiled_grads], 2 * exact, 2 * bounds, strict=True):
            assert got.dtype == wide
            torch.testing.assert_close(got.double(), want, rtol=gap, atol=least)
        assert torch.equal(logits, before), "others may still read them"


def test_a_compiled_model_s_head_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = ModelRuntime(torch.device("cpu"), torch.float32, "stream")
    model = load_policy(make_tiny_model(tmp_path), runtime)
    check_passes(model)
    used = []
    seen = logprobs.block_math
    monkeypatch.setattr(
        logprobs,
        "block_math",
        lambda device, *, compiled: used.append(compiled) or seen(device, compiled=compiled),
    )
    batch = response_batch(
        prompts=[[5, 6]], responses=[[7, 8]], group_ids=[0], pad_token_id=0, problems=()
    )
    plain = forward_only(model, batch, 1, 1.0)
    compile_layers(model)
    compiled = forward_only(model, batch, 1, 1.0)
    torch.testing.assert_close(compiled.logprobs, plain.logprobs)
    assert used == [False, True]


def test_where_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert why_plain(cpu, compiled=False) and not why_plain(cpu, compiled=True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert why_plain(gpu, compiled=False) is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "triton" in str(why_plain(gpu, compiled=True))
    assert block_math(gpu, compiled=True) is PLAIN


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
