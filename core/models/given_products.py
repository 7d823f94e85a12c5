"""A model whose linear layers are told what they give, and only make gradients.

Axes: S tokens of a stream, K tokens of which outputs are known, I and O sizes of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from posttrain.core.models.wide_products import WideLinear, linear_gradients


class _Given(torch.autograd.Function):
    """Rows `places` of `known`, with the gradients of x @ weight.T + bias.

    They are a copy: torch.compile takes a view of an argument for something without a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, known: Tensor, places: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        return known.index_select(0, places).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        return *linear_gradients(ctx, x, weight, grad), None, None


class _GivenLinear(torch.nn.Linear):
    """A linear layer during one forward pass of which it gives rows `places` [S] of `known`."""

    known: Tensor
    places: Tensor

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = _Given.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.known, self.places
        )
        del self.known  # used once, and freed layer by layer
        return output


@contextmanager
def products_given(
    model: torch.nn.Module, known: dict[str, Tensor], places: Tensor
) -> Iterator[None]:
    """Inside, linear layers named in `known` give rows `places` [S] of it [K, O], and no product.

    Layers of other classes than torch's own and `WideLinear` compute as ever. `known` is empty
    afterwards.
    """
    layers: list[tuple[Any, type]] = []  # Any: linear layers that take new attributes
    for name in list(known):
        rows, layer = known.pop(name), cast(Any, model.get_submodule(name))
        if type(layer) in (torch.nn.Linear, WideLinear):
            layers.append((layer, type(layer)))
            layer.__class__ = _GivenLinear
            layer.known, layer.places = rows, places
    try:
        yield
    finally:
        for layer, own in layers:
            layer.__class__ = own
            layer.__dict__.pop("known", None)
            del layer.places
