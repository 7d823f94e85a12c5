"""Gradient checkpointing: a layer's inside is computed again in the backward pass, not kept."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from posttrain.core.errors import ConfigError


def use_checkpointing(model: torch.nn.Module) -> None:
    """Keep only the inputs of each layer of `model` for the backward pass."""
    layers = list(_layers(model))
    if not layers:
        kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        raise ConfigError(
            f"model type '{kind}' has no layers that transformers can checkpoint: set "
            "model.gradient_checkpointing to false"
        )
    for layer in layers:
        for name, value in vars(layer).items():
            if "dropout" in name and isinstance(value, float):
                setattr(layer, name, 0.0)
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
        layer.gradient_checkpointing = True
        layer.training = True


def is_checkpointed(model: torch.nn.Module) -> bool:
    return any(layer.gradient_checkpointing for layer in _layers(model))


def _layers(model: torch.nn.Module) -> Any:  # Any: transformers' layers are not typed
    return (part for part in model.modules() if isinstance(part, GradientCheckpointingLayer))
