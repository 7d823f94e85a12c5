"""Models under autocast or sharded over ranks (FSDP2), used like whole ones.

The weights are their own masters, so nothing copies them back after a step; in exchange every
product casts its weight. Norms, residual sums and softmaxes stay in float32.

A layer's weights are gathered for its forward and backward pass and dropped again; gradients are
summed over ranks in float32. With several copies of the weights (HSDP) they are gathered within a
copy, and gradients are summed over copies as well. Embeddings, the last norm and the head belong to
the model itself, and stay whole from a forward pass to the end of its backward pass: log-probs are
made of the head's weight by a function of ours, after the model has returned.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from posttrain.core.models.layers import backbone_of, decoder_layers

_COMPUTES = "posttrain_compute_dtype"


def use_autocast(model: PreTrainedModel, compute: torch.dtype) -> None:
    setattr(model, _COMPUTES, compute)


def compute_dtype(model: PreTrainedModel) -> torch.dtype:
    """The precision of a model's products: that of its weights, unless it casts them."""
    found: torch.dtype = getattr(model, _COMPUTES, model.dtype)
    return found


def casting(model: PreTrainedModel) -> AbstractContextManager[Any]:  # Any: torch's is untyped
    compute = compute_dtype(model)
    if compute == model.dtype:
        return nullcontext()
    return torch.autocast(model.device.type, compute)


_ENTRY = "posttrain_backbone"


def mesh_of(device_type: str, size: int, shard_size: int | None = None) -> DeviceMesh:
    """`size` ranks that hold one copy of the weights, or a copy for each `shard_size` neighbours.

    Where `shard_size` does not divide `size`, as after a loss, there is one copy.
    """
    if shard_size is None or shard_size >= size or size % shard_size:
        return init_device_mesh(device_type, (size,))
    names = ("copy", "shard")
    return init_device_mesh(device_type, (size // shard_size, shard_size), mesh_dim_names=names)


def shard(model: PreTrainedModel, mesh: DeviceMesh, compute: torch.dtype) -> None:
    """Spread the weights of `model` over the ranks of a `mesh_of`; computes in `compute`."""
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Losses are shares of the whole already: gradients are summed, never averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum

    def backbone(**inputs: Any) -> Any:  # Any: transformers' outputs
        return backbone_of(model)(**inputs)

    setattr(model, _ENTRY, backbone)
    register_fsdp_forward_method(model, _ENTRY)


def run_backbone(model: PreTrainedModel, **inputs: Any) -> Any:  # Any: transformers' outputs
    """The layers of `model` below its head."""
    with casting(model):
        return getattr(model, _ENTRY, backbone_of(model))(**inputs)


def put_away(model: PreTrainedModel) -> None:
    """After passes without gradient: drop what a sharded model still holds whole.

    It would be stale once the optimizer has moved this rank's piece.
    """
    if isinstance(model, FSDPModule):
        model.reshard()


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, of which this rank may have a piece; all ranks must ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
