"""Products of bfloat16 matrices on a processor without instructions for them, made in float32.

There PyTorch makes them with kernels that are several times as slow as float32's
(docs/performance.md). Here the matrices are cast first. float32 holds bfloat16's numbers and the
products of two of them exactly, sums are in float32 as the instructions have them, and the result
is rounded to bfloat16 once: the numbers are as good, and nothing is kept longer in float32.
"""

from __future__ import annotations

import platform
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from posttrain.core.runtime.processor import has_bfloat16_instructions


def _cpu_emulates() -> bool:
    """Whether this processor has no instructions for products of bfloat16.

    On x86-64 oneDNN emulates them with AVX-512 as well, at a quarter or a third of float32's
    speed. Elsewhere it is asked itself; the question has no public name, and is PyTorch's own.
    """
    if platform.machine() in ("x86_64", "AMD64"):
        return not has_bfloat16_instructions()
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return supported is None or not supported()


# Asked once: compiled layers read it as a constant.
CPU_EMULATES = _cpu_emulates()


def is_emulated(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products in `dtype` on `device` are made in float32 here."""
    return CPU_EMULATES and dtype == torch.bfloat16 and device.type == "cpu"


def product_type(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What products in `dtype` on `device` are made in before they are rounded to it."""
    return torch.float32 if is_emulated(dtype, device) else dtype


class _Product(torch.autograd.Function):
    """one @ other by way of float32; neither is kept so for the backward pass."""

    @staticmethod
    def forward(ctx: Any, one: Tensor, other: Tensor) -> Tensor:  # Any: torch's is untyped
        ctx.save_for_backward(one, other)
        return torch.matmul(one.float(), other.float()).to(one.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        one, other = ctx.saved_tensors
        wide = grad.float()
        need_one, need_other = ctx.needs_input_grad
        return (
            torch.matmul(wide, other.float().mT).to(one.dtype) if need_one else None,
            torch.matmul(one.float().mT, wide).to(other.dtype) if need_other else None,
        )


def product(one: Tensor, other: Tensor) -> Tensor:
    """`one` [..., n, k] @ `other` [..., k, m] of the same type and the same leading axes."""
    if not is_emulated(one.dtype, one.device):
        return torch.matmul(one, other)
    found: Tensor = _Product.apply(one, other)  # type: ignore[no-untyped-call]
    return found


class _Linear(torch.autograd.Function):
    """x @ weight.T + bias in the same way, the bias added before the result is rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        wide = None if bias is None else bias.float()
        return functional.linear(x.float(), weight.float(), wide).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        return linear_gradients(ctx, x, weight, grad)


def linear_gradients(
    ctx: Any,  # Any: as above
    x: Tensor,
    weight: Tensor,
    grad: Tensor,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """What a layer's `grad` [..., O] gives to x [..., I], weight [O, I] and bias [O] that `ctx`,
    whose first three inputs they are, needs."""
    kind = product_type(x.dtype, x.device)
    rows = grad.flatten(0, -2).to(kind)
    need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
    return (
        (rows @ weight.to(kind)).view(x.shape).to(x.dtype) if need_x else None,
        (rows.t() @ x.flatten(0, -2).to(kind)).to(x.dtype) if need_weight else None,
        rows.sum(dim=0).to(x.dtype) if need_bias else None,
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear`, by way of float32 where that is needed."""
    if not is_emulated(x.dtype, x.device):
        return functional.linear(x, weight, bias)
    found: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return found


class WideLinear(torch.nn.Linear):
    """A linear layer whose products are made so."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def widen(model: torch.nn.Module) -> None:
    """Let the linear layers of `model` compute so, if its type and place need it."""
    for layer in model.modules():
        if type(layer) is torch.nn.Linear and is_emulated(layer.weight.dtype, layer.weight.device):
            layer.__class__ = WideLinear
