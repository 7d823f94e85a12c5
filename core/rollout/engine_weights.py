"""The weights of an engine's own copy of a model: taken from the trainer, compared, packed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.core.models.adapters import check_adapter
from posttrain.core.models.packed_linear import When, can_pack, pack
from posttrain.core.models.wide_products import widen
from posttrain.core.rollout_sampling import checked_weights


class EngineWeights:
    """Weights of `model` (transformers'), and the adapter that may be around its layers."""

    def __init__(self, model: Any, packed: When) -> None:  # Any: model classes are not typed
        self._model = model
        self._adapter: Any = None  # Any: peft's, imported when one is synced
        parameters = {name for name, _ in model.named_parameters()}
        buffers = {name for name, _ in model.named_buffers()}
        state = model.state_dict()
        self._tied = frozenset(set(state) - parameters - buffers)
        # The base weights by name, whatever wraps them later.
        self._own: dict[str, Tensor] = {n: t for n, t in state.items() if n not in self._tied}
        self._packs = can_pack(model, packed)
        self._pack()

    @torch.no_grad()
    def take(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy all weights in place and drop the adapter. Only a tied output layer may be left out.

        Raises `RunError` on a missing, unknown or misshaped weight and keeps the old weights.
        """
        given = checked_weights(weights, self._shapes, self._tied)
        self._drop_adapter()
        for name, tensor in self._own.items():
            tensor.copy_(given[name])
        self._pack()

    @torch.no_grad()
    def differing(self, weights: Iterable[tuple[str, Tensor]]) -> tuple[str, ...]:
        own = self._own
        return tuple(
            name
            for name, tensor in weights
            if name in own and not _same_bits(own[name], tensor.to(own[name]))
        )

    def take_adapter(self, folder: Path) -> None:
        """Put the adapter's layers around the base layers, in place of those before."""
        check_adapter(folder, self._shapes)
        from peft import PeftModel

        self._drop_adapter()
        device = str(self._model.device)
        self._adapter = PeftModel.from_pretrained(self._model, folder, torch_device=device)

    def _drop_adapter(self) -> None:
        if self._adapter is not None:
            self._adapter.unload()
            self._adapter = None

    def _pack(self) -> None:
        if self._packs:
            pack(self._model)
        else:
            widen(self._model)

    @property
    def _shapes(self) -> dict[str, Sequence[int]]:
        return {name: tensor.shape for name, tensor in self._own.items()}


def _same_bits(*pair: Tensor) -> bool:
    """Whether two tensors of one shape and type are equal, eight bytes at a time where they can."""
    one, other = pair
    if all(
        x.is_contiguous() and x.nbytes % 8 == 0 and x.storage_offset() * x.itemsize % 8 == 0
        for x in pair
    ):
        one, other = (x.view(-1).view(torch.int64) for x in pair)
    return torch.equal(one, other)
