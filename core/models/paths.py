"""How a model's log-probs are computed here: its output head, and the short cuts it allows.

`core.training.agreement` fills this in for a model that was loaded, by numbers. Axes: N rows,
H hidden size, V vocabulary, S tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from posttrain.core.models.layers import backbone_of
from posttrain.core.models.linear import linear, product


@dataclass(frozen=True, slots=True)
class HeadShape:
    """How logits follow from what the head's layer returns: cap x tanh(scale x / cap), elementwise.

    `inputs` is the factor between the backbone's last states and what the layer is given.
    """

    scale: float = 1.0
    cap: float | None = None
    inputs: float = 1.0

    def of(self, raw: Tensor) -> Tensor:
        """Logits of `raw`, the layer's output."""
        if self.cap is not None:
            return self.capped(raw).to(raw.dtype)
        return raw if self.scale == 1.0 else raw * self.scale

    def capped(self, raw: Tensor) -> Tensor:
        """The same under a cap, in at least float32."""
        assert self.cap is not None
        wide = raw.to(torch.promote_types(raw.dtype, torch.float32))
        return (wide * (self.scale / self.cap)).tanh_() * self.cap


@dataclass(frozen=True, slots=True)
class OutputHead:
    """Makes logits [N, V] of states [N, H]; without a `weight` [V, H] the states are the logits."""

    weight: Tensor | None
    bias: Tensor | None = None
    shape: HeadShape = field(default_factory=HeadShape)

    def logits(self, hidden: Tensor, weight: Tensor | None = None) -> Tensor:
        """In at least float32; `weight` may stand for the own one, with its own gradient."""
        weight = self.weight if weight is None else weight
        raw = hidden if weight is None else project(hidden, weight, self.bias)
        return self.shape.of(raw.to(torch.promote_types(raw.dtype, torch.float32)))

    def detached(self, device: torch.device | None = None) -> OutputHead:
        """The same without gradient, on `device`."""
        return self._with(lambda part: part.detach().to(device))

    def copied(self) -> OutputHead:
        """A copy that later updates do not change."""
        return self._with(lambda part: part.detach().clone())

    def _with(self, change: Callable[[Tensor], Tensor]) -> OutputHead:
        weight, bias = (None if p is None else change(p) for p in (self.weight, self.bias))
        return OutputHead(weight, bias, self.shape)


def project(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[N, V]; the bias is added before the result is rounded."""
    return product(hidden, weight.t()) if bias is None else linear(hidden, weight, bias)


@dataclass(slots=True)
class Paths:
    """What is known of a model. `head` is None where only the model itself makes its logits.

    `refused` are the short cuts that give other numbers than the model, with the reason:
    `keys` (responses continue from their prompt's keys and values), `padding` (rows of different
    lengths in one pass). `plain` is the attention implementation that the model was loaded with.
    `notes` are sentences on what is computed in a slower way, and why.
    """

    checked: bool = True
    plain: str | None = None
    head: HeadShape | None = field(default_factory=HeadShape)
    refused: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


_PATHS = "posttrain_paths"


def paths_of(model: Any) -> Paths:  # Any: transformers' model classes are not typed
    """What is known of `model`; a model that was not loaded by us counts as checked."""
    found: Paths | None = getattr(model, _PATHS, None)
    if found is None:
        found = Paths()
        setattr(model, _PATHS, found)
    return found


@contextmanager
def eager_attention(model: Any) -> Iterator[None]:  # Any: as above
    """Inside, `model` attends as its authors wrote it down, without a kernel."""
    own = model.config._attn_implementation
    attend(model, EAGER)
    try:
        yield
    finally:
        attend(model, own)


def use_plain_attention(model: Any) -> None:  # Any: as above
    """Let `model` attend as it did when it was loaded."""
    attend(model, paths_of(model).plain)


def attend(model: Any, how: str | None) -> None:  # Any: as above
    if how is not None and how != model.config._attn_implementation:
        model.set_attn_implementation(how)


EAGER = "eager"

# Inputs of the function from the layer's output to logits: small ones give its slope, large ones
# its bound, those between show whether it is the function that these say.
SMALL, LARGE, BETWEEN = 1e-3, 1e6, 60.0
SHAPE_TOLERANCE = 1e-4


@torch.no_grad()
def find_head(model: Any, ids: Tensor) -> HeadShape | str:  # Any: as above
    """The shape of the head of `model`, found by numbers on `ids` [1, S], S >= 3; or why none fits.

    The outputs of the head's layer are replaced by known numbers, and the model's logits show what
    it does to them, whatever its config calls that.
    """
    layer = model.get_output_embeddings()
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return "it has no output layer with one matrix"
    seen: dict[str, Tensor] = {}

    backbone = backbone_of(model)

    def on_backbone(module: Any, args: Any, output: Any) -> None:
        found: Any = output[0] if isinstance(output, tuple) else output
        seen["states"] = getattr(found, "last_hidden_state", found)

    def on_head(module: Any, args: Any, output: Tensor) -> Tensor:
        seen["input"], seen["output"] = args[0], output
        probe = torch.zeros(
            output.shape, dtype=torch.promote_types(output.dtype, torch.float32), device=ids.device
        )
        spread = torch.linspace(-1, 1, output.shape[-1], dtype=probe.dtype, device=ids.device)
        for token, size in enumerate((SMALL, LARGE, BETWEEN)):
            probe[:, token] = spread * size
        seen["probe"] = probe
        return probe

    # Some models call a part of the backbone; where both are called, the backbone ends last.
    parts = {backbone, model.get_decoder()} - {model, layer}
    hooks = [
        *(part.register_forward_hook(on_backbone) for part in parts),
        layer.register_forward_hook(on_head),
    ]
    try:
        logits = model(input_ids=ids, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    if seen.keys() != {"states", "input", "output", "probe"}:
        return "its logits are not made by its output layer"
    return _shape_of(seen, logits, weight, getattr(layer, "bias", None))


def _shape_of(
    seen: dict[str, Tensor], logits: Tensor, weight: Tensor, bias: Tensor | None
) -> HeadShape | str:
    given, states, probe = seen["input"], seen["states"].to(seen["input"]), seen["probe"]
    if logits.shape != probe.shape or given.shape != states.shape:
        return "its logits are not one for each output of its output layer"
    inputs = float((given.double() * states.double()).sum() / states.double().square().sum())
    inputs = 1.0 if abs(inputs - 1) < 1e-3 else inputs
    tolerance = 1e-3 if given.dtype in (torch.float32, torch.float64) else 3e-2
    if not _is_close(given, states * inputs, tolerance):
        return "its output layer is not given the last states of its layers"
    if not _is_close(seen["output"], functional.linear(given, weight, bias), tolerance):
        return "its output layer is more than a matrix and a bias"
    small, large = logits[0, 0].double(), logits[0, 1].double()
    scale = float(small[-1] / probe[0, 0, -1].double())
    cap = float(large[-1]) if abs(float(large[-1])) < LARGE * abs(scale) / 2 else None
    shape = HeadShape(_rounded(scale), None if cap is None else _rounded(cap), inputs)
    if not scale or not _is_close(logits, shape.of(probe.to(logits)), SHAPE_TOLERANCE):
        return "its logits are not a scaled or softly capped product"
    return shape


def _rounded(value: float) -> float:
    """`value` without the rounding of float32, where it is a short decimal number."""
    short = float(f"{value:.6g}")
    return short if abs(short - value) <= 2e-7 * abs(value) else value


def _is_close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Token by token: the largest gap within `tolerance` of the largest value."""
    gap = (one.double() - other.double()).abs().amax(dim=-1)
    return bool((gap <= tolerance * other.double().abs().amax(dim=-1)).all())


def output_head(model: Any, dtype: torch.dtype) -> OutputHead:  # Any: as above
    """What makes logits of the states that `core.training.forward` returns, in `dtype`."""
    shape = paths_of(model).head
    if shape is None:
        return OutputHead(None)
    layer = model.get_output_embeddings()
    bias = getattr(layer, "bias", None)
    return OutputHead(layer.weight.to(dtype), None if bias is None else bias.to(dtype), shape)
