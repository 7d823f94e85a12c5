"""The decoder layers of a model: where they are, compiled, or recomputed in the backward pass.

One layer is compiled and serves all, for any number of tokens; FlexAttention with it. Where a
stream's attention is by grids it stays outside: its shapes follow how prompts and responses happen
to lie, and each new way would be compiled again.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from posttrain.core.errors import ConfigError

if TYPE_CHECKING:  # plugins are listed without loading transformers
    from transformers import PreTrainedModel


def backbone_of(model: Any) -> Any:  # Any: transformers' model classes are not typed
    """The part of `model` below its head."""
    from transformers import PreTrainedModel

    found = model.base_model
    if found is not model:
        return found
    return next((part for part in model.children() if isinstance(part, PreTrainedModel)), found)


def decoder_layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    """The decoder layers: the longest list of modules that the backbone has."""
    lists = [m for m in model.base_model.modules() if isinstance(m, torch.nn.ModuleList)]
    return max(lists, key=len)


logger = logging.getLogger(__name__)

# A layer is compiled with and without gradients, for inputs that need one and those that do not,
# for each stage's kind of batch. Beyond torch's limit of 8 it would go on uncompiled.
_WAYS = 64


def allow_ways() -> None:
    torch.compiler.config.recompile_limit = max(torch.compiler.config.recompile_limit, _WAYS)


def compile_layers(model: PreTrainedModel) -> None:
    """Let each decoder layer of `model` be compiled when it is first called."""
    allow_ways()
    for layer in decoder_layers(model):
        layer.compile(dynamic=True)
    logger.info("layers are compiled in the first updates, which take 10 to 30 s longer")


def is_compiled(model: PreTrainedModel) -> bool:
    return any(layer._compiled_call_impl is not None for layer in decoder_layers(model))


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
    from transformers.modeling_layers import GradientCheckpointingLayer

    return (part for part in model.modules() if isinstance(part, GradientCheckpointingLayer))
