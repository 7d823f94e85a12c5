"""Linear layers of an engine on a CPU, their weights kept in the order that oneDNN reads them in.

A product of few rows with a bfloat16 weight in torch's order first reorders the whole weight, every
time: with 64 rows on two cores that is a third of it. In float32 torch asks another library, which
is slower for few rows (docs/performance.md). Where bfloat16 products are made in float32
(`wide_products`) the packed copy is float32's already. Nothing here has a gradient.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from posttrain.core.models.wide_products import WideLinear, linear, product_type

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
    """Keep the weights of linear layers packed beside what they are; again after they changed."""
    for layer in _linears(model):
        layer.__class__ = _PackedLinear
        weight = layer.weight.detach()
        weight = weight.to(product_type(weight.dtype, weight.device))
        layer.packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        layer.version = layer.weight._version


def _linears(model: Any) -> list[Any]:  # Any: as above; linear layers that take a new attribute
    kinds = (torch.nn.Linear, WideLinear, _PackedLinear)
    return [m for m in model.modules() if type(m) in kinds]
