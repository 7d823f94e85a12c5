"""Linear layers on a CPU: bfloat16 without native instructions, and packed weights.

There PyTorch makes them with kernels that are several times as slow as float32's
(docs/performance.md). Here the matrices are cast first. float32 holds bfloat16's numbers and the
products of two of them exactly, sums are in float32 as the instructions have them, and the result
is rounded to bfloat16 once: the numbers are as good, and nothing is kept longer in float32.

A product of few rows with a bfloat16 weight in torch's order first reorders the whole weight, every
time: with 64 rows on two cores that is a third of it. In float32 torch asks another library, which
is slower for few rows (docs/performance.md). Where bfloat16 products are made in float32
(`wide_products`) the packed copy is float32's already. Nothing here has a gradient.
"""

from __future__ import annotations

import platform
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from posttrain.core.runtime.machine import has_bfloat16_instructions


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


# The batch that the order is chosen for; products of any other are right as well.
ROWS = 64
# The most that the second copy may take by itself.
MOST_BYTES = 10**9
When = Literal["auto", "always", "never"]


class _PackedLinear(torch.nn.Linear):
    packed: Tensor | None = None
    version: int  # the weight's when it was packed

    def forward(self, input: Tensor) -> Tensor:
        # A weight that has changed since is never answered for by its old copy.
        if self.packed is None or self.weight._version != self.version:
            return linear(input, self.weight, self.bias)
        bias = None if self.bias is None else self.bias.to(self.packed.dtype)
        result: Tensor = torch.ops.mkldnn._linear_pointwise(
            input.to(self.packed.dtype), self.packed, bias, "none", [], ""
        )
        return result.to(input.dtype)


def why_no_packing(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why weights of `dtype` on `device` cannot be packed; None if they can.

    The operators are those that torch's own compiler emits; they have no public name.
    """
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float32):
        return "only products in bfloat16 or float32 on a CPU are oneDNN's"
    needed = ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise")
    if not all(hasattr(torch.ops.mkldnn, name) for name in needed):
        return f"torch {torch.__version__} does not offer oneDNN's order"
    low = product_type(dtype, device) == torch.bfloat16
    if low and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "oneDNN has no bfloat16 products here"
    return None


def packed_bytes(model: Any) -> int:  # Any: transformers' model classes are not typed
    size = product_type(model.dtype, model.device).itemsize
    return sum(layer.weight.numel() * size for layer in _linears(model))


def can_pack(model: Any, when: When) -> bool:  # Any: as above
    return packs(packed_bytes(model), model.dtype, model.device, when)


def packs(size: int, dtype: torch.dtype, device: torch.device, when: When) -> bool:
    """The same for a model whose linear layers take `size` bytes when they are packed."""
    if when == "never" or why_no_packing(dtype, device) is not None:
        return False
    return when == "always" or size <= MOST_BYTES


@torch.no_grad()
def pack(model: Any) -> None:  # Any: as above
    """Keep the weights of linear layers packed next to what they are; again after they changed."""
    for layer in _linears(model):
        layer.__class__ = _PackedLinear
        weight = layer.weight.detach()
        weight = weight.to(product_type(weight.dtype, weight.device))
        layer.packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        layer.version = layer.weight._version


def _linears(model: Any) -> list[Any]:  # Any: as above; linear layers that take a new attribute
    kinds = (torch.nn.Linear, WideLinear, _PackedLinear)
    return [m for m in model.modules() if type(m) in kinds]
